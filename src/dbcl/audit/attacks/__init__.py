"""The attacks, one file for each thing that can leak, from transcripts to findings.

| module          | looks for                         | reads                                                      |
|-----------------|-----------------------------------|------------------------------------------------------------|
| `updates.py`    | the others' updates               | client-N                                                   |
| `images.py`     | the victim's pictures             | server; client-0                                           |
| `labels.py`     | the victim's labels               | client-0                                                   |
| `properties.py` | a property of the victim's batch  | server; client-0                                           |
| `membership.py` | whether an example was trained on | no transcript: the finished model, and one broadcast of it |
| `gan.py`        | a class of the victim's, drawn    | client-N, round by round: it is a client of the run        |
| `span.py`       | a client's examples and pictures  | no transcript: one client's update, and its broadcast      |

In a rehearsal client 0 is the attacker, or several clients are together; client-N is any client of the run itself. The
rest is what these attacks are made of: `victim.py` for the lane that the victim is in; `gradients.py`, `matching.py`
and `first_layer.py` for pictures; `sources.py`, `own_data.py`, `learners.py` and `round_filters.py` for properties;
`roc.py` for all that is told apart by scores.
"""

from collections.abc import Callable

OnProgress = Callable[[str], None]
"""Called with a line that says what is being done."""
