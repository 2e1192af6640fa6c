"""Attacks, one file for each kind of leak, from transcripts to findings.

| module                     | looks for                                 | reads                                       |
|----------------------------|-------------------------------------------|---------------------------------------------|
| `updates.py`               | the others' updates                       | client-N                                    |
| `trajectory_updates.py`    | the same, beyond what the drift says      | client-N and its allies                     |
| `members.py`               | examples that clients train on            | client-N and its allies                     |
| `images.py`                | the victim's images                     | server; client-0                            |
| `trajectory_images.py`   | images that a client has in every round | client-0                                    |
| `labels.py`                | the victim's labels                       | client-0                                    |
| `properties.py`            | a property of the victim's batch          | server; client-0                            |
| `trajectory_properties.py` | the same, from all rounds together        | client-0                                    |
| `membership.py`            | whether an example was trained on         | the finished model, and one broadcast of it |
| `span.py`                  | a client's examples and images          | one client's update, and its broadcast      |
| `span_rounds.py`           | examples, from the first rounds together  | server; client-N                            |
| `update_labels.py`         | a client's labels                         | the same                                    |
| `update_images.py`       | a client's few images                   | the same                                    |
| `gan.py`                   | a class of the victim's, drawn            | client-N, as a client of the run            |

In a simulated run client 0 is the attacker, or several clients collude; client-N is any client of
the run itself. The other files are building blocks: `trajectory.py` for all rounds together, with
`layer_gradients.py`; `victim.py` for the lane that the victim is in; `gradients.py`, `matching.py`,
`local_steps.py` and `first_layer.py` for images, `trajectory_likelihood.py`,
`trajectory_first_layer.py` and `trajectory_victim.py` for those of all rounds; `sources.py`,
`own_data.py`, `learners.py` and `round_filters.py` for properties; `roc.py` for ROC curves.
"""
