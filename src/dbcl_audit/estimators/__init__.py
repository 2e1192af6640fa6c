"""Estimates of the other clients' updates from one client's transcript: options I and II, rewind,
and the smoothers.

A client knows every sketch R_t and its own part of every update. With the rows of W as unknown
states, it observes

    V_t = W_t R_t + tau Z_t            W_(t+1) = W_t + (own part) + U_t R_t^T

and estimates U_t. With several lanes the update is a sum of U_(t,k) R_(t,k)^T over the lanes k of
the other clients. The client can compute the sketches of all lanes, but observes W_t only through
its own lane. All estimators return the change of W between successive observed rounds without the
client's own part, which the client knows. All rows of W follow the same equations independently and
share one covariance.

`observations.py` collects the client's observations, `pooled.py` those of colluding clients, and
`others.py` the sketches of the other clients' updates. `paper_estimators.py`, `rewind.py` and
`smoother.py` contain the estimators. `kalman.py` and `covariance.py` implement the linear algebra
of the smoothers, and `state_space.py` a solver for models with drift.
"""
