"""An audit with every kind of finding once, curves, images, failures, holes and hostile text."""

import math

from dbcl_audit.findings import Audit, Curve, Finding

HOSTILE = "<script>alert('x')</script> & \"quoted\" https://example.org"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # one pixel


def made_up() -> Audit:
    """Every kind of finding once, with curves, images, failures, holes and hostile text."""
    rounds = tuple(float(t) for t in range(1, 101))
    rise = Curve("cosine of one update", rounds, tuple(1 - 0.7**t for t in rounds))
    flat = Curve(HOSTILE + " $x_", rounds, (0.01,) * 99 + (math.nan,))
    roc = Curve("2,000 examples", tuple(i / 2000 for i in range(2001)), tuple((i / 2000) ** 0.5 for i in range(2001)))
    by_round = ("round", "cosine")
    rates = ("false positive rate", "true positive rate")
    grid = (("true", PIXEL), ("worst case: 44.9 dB", PIXEL), (HOSTILE, PIXEL), ("broken", "' onerror='x"))
    budget = {"rounds seen": 100, "steps": 300, "restarts": 3, "priors": ["none", "total variation"]}
    findings = (
        Finding(
            "option I", "client", "naive", "update", "cosine", 0.002, -0.01, 0.012, 0.0, curves=(flat,), axes=by_round
        ),
        Finding("option I", "client", "naive", "update", "relative error", 290.0, chance=1.0),
        Finding(
            "rewind",
            "client",
            "adaptive",
            "update",
            "cosine",
            0.9999,
            0.99,
            1.0,
            0.0,
            budget,
            curves=(rise,),
            axes=by_round,
        ),
        Finding("rewind", "client", "adaptive", "update", "relative error", 1e-5, chance=1.0, budget=budget),
        Finding("matching", "client", "naive", "image", "psnr", 3.1, 2.0, 4.0, 12.8, failures=("diverged twice",)),
        Finding(
            "matching on rewind", "client", "adaptive", "image", "psnr", 44.9, 38.0, 93.0, 12.8, budget, images=grid
        ),
        Finding("matching on rewind", "client", "adaptive", "image", "ssim", 0.93, chance=0.2),
        Finding("matching on rewind", "client", "adaptive", "image", "share above 20 dB", 1.0, chance=0.0),
        Finding("through the sketch", "server", "adaptive", "image", "psnr", math.inf, chance=12.8),
        Finding("unprotected tensors", "client", "adaptive", "label", "accuracy", 0.98, 0.9, 1.0, 0.1),
        Finding("forest", "client", "naive", "property", "auc", 0.484, 0.43, 0.53, 0.5),
        Finding(
            "matched filter", "client", "adaptive", "property", "auc", 0.79, 0.74, 0.84, 0.5, curves=(roc,), axes=rates
        ),
        Finding(
            "loss threshold", "anyone", "naive", "membership", "auc", 0.56, 0.5, 0.62, 0.5, curves=(roc,), axes=rates
        ),
        Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.031, 0.02, 0.05),
        Finding(
            "LiRA",
            "anyone",
            "adaptive",
            "membership",
            "tpr at 0.1 % fpr",
            0.007,
            budget={"members": 900, "non-members": 800},
        ),
        Finding(HOSTILE, "client", "adaptive", "membership", "auc", math.nan, failures=("no shadow models", HOSTILE)),
        Finding("odd", "client", "naive", "update", "relative error", 3.0, note=HOSTILE),
    )
    adversaries = (
        ("client", "for each of its rounds: seed, plan, all V; its own data and updates", "W, other clients' updates"),
        ("server", "W, all seeds, each client's dV", HOSTILE),
    )
    settings = {"veil": 0.0, "sketch": "count-v1", "ratio": 2.0, "clients": 10, "fraction": 0.2, "data": HOSTILE}
    settings |= {"unprotected": ["fc3.weight", "fc3.bias"], "seed": 0, "norm_bound": None}
    run = {"accuracy": 0.923, "rounds": 400, "bytes": 123_456_789}
    return Audit(
        f"paper {HOSTILE}",
        settings,
        run,
        adversaries,
        findings,
        73.2,
        date="2026-01-31 09:05 UTC",
        version="9.8.7",
        parties=3,
        property_name=f"thick strokes {HOSTILE}",
        budget={"shadow_models": 16, "seed": 41, "estimators": ("rewind", HOSTILE)},
    )
