"""Estimates of the other clients' updates from one client's transcript: options I and II, rewind,
and the smoothers.

A client knows every sketch R_t and its own part of every update. With W's rows as unknown states it
sees

    V_t = W_t R_t + tau Z_t            W_(t+1) = W_t + (own part) + U_t R_t^T

and estimates U_t. With several lanes the update is a sum of U_(t,k) R_(t,k)^T over the lanes k of
the others, whose sketches the client can draw as well, while it sees W_t through its own lane only.
All estimators give the change of W from one seen round to the next *without* the client's own part,
since that part is no secret to it. Rows of W obey the same equations independently, so one
covariance serves all.

view.py gathers what the client saw, pooled.py what several see together, and others.py through
which sketches the others' updates come; options.py, rewind.py and smoother.py estimate; kalman.py
and covariance.py are the smoothers' arithmetic.
"""
