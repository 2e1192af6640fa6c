"""Estimates of the other clients' updates from one client's transcript: options I and II, rewind, and the smoothers.

A client knows every sketch R_t and its own part of every update. With W's rows as unknown states it sees

    V_t = W_t R_t + tau Z_t            W_(t+1) = W_t + (own part) + U_t R_t^T

and estimates U_t. All estimators give the change of W from one seen round to the next *without* the client's own part,
since that part is no secret to it. Rows of W obey the same equations independently, so one covariance serves all.

view.py gathers what the client saw; options.py, rewind.py and smoother.py estimate; kalman.py and covariance.py are the
smoothers' arithmetic.
"""
