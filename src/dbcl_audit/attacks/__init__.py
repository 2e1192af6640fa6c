"""Attacks on transcripts that produce findings, with one module for each kind of leak.

| module                     | infers                                 | reads                      |
|----------------------------|----------------------------------------|----------------------------|
| `updates.py`               | other clients' updates                 | client-N                   |
| `trajectory_updates.py`    | other clients' updates, beyond drift   | client-N and its allies    |
| `members.py`               | other clients' training examples       | client-N and its allies    |
| `images.py`                | the victim's images                    | server; client-0           |
| `trajectory_images.py`     | the victim's images, fixed over rounds | client-0                   |
| `labels.py`                | the victim's labels                    | client-0                   |
| `properties.py`            | a property of the victim's batch       | server; client-0           |
| `trajectory_properties.py` | the same property, from all rounds     | client-0                   |
| `membership.py`            | membership in the training data        | final model; one broadcast |
| `span.py`                  | a client's examples                    | one update; its broadcast  |
| `span_rounds.py`           | a client's examples, several rounds    | server; client-N           |
| `update_labels.py`         | a client's label counts                | one update; its broadcast  |
| `update_images.py`         | a client's images, if few              | one update; its broadcast  |
| `gan.py`                   | images of a class of the victim        | client-N (active attacker) |

In a simulated run, client 0 is the attacker, or several clients collude. client-N is any client of
the audited run.

The other modules are building blocks: `trajectory.py` and `layer_gradients.py` for attacks on all
rounds; `victim.py` for the victim's lane; `gradients.py`, `matching.py`, `local_steps.py` and
`first_layer.py` for images; `trajectory_likelihood.py`, `trajectory_first_layer.py` and
`trajectory_victim.py` for images from all rounds; `sources.py`, `own_data.py`, `learners.py` and
`round_filters.py` for properties; `roc.py` for ROC curves.
"""
