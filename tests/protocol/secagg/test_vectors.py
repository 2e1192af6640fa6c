"""The primitives as they are called, against the vectors of their standards; and bytes that must never change."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.poly1305 import Poly1305
from robustness import fuzz

from dbcl.errors import DbclError, ProtocolError
from dbcl.protocol.codec import SECAGG
from dbcl.protocol.secagg import decode_message, encode_message, keys
from dbcl.protocol.secagg.keys import KeyPair, SigningKey, derive, digest, opened, seal
from dbcl.protocol.secagg.masks import PIECE, add_masks
from dbcl.protocol.secagg.messages import (
    Advert,
    Agreed,
    Agreement,
    Delivery,
    Masked,
    Member,
    Message,
    Reveal,
    Roster,
    Shares,
    Survivors,
)
from dbcl.protocol.secagg.quantizer import packed
from dbcl.protocol.secagg.shares import combined, split
from dbcl.protocol.secagg.statements import committed, pairwise, share_digests

GOLDEN = Path(__file__).parents[2] / "golden"


def test_x25519_of_rfc_7748(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 6.1, as Bob; the scalar stands for what is derived from the shared seed."""
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    monkeypatch.setattr(keys, "derive", lambda seed, *info: bob)
    pair = KeyPair(bytes(16))
    assert pair.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert pair.agree(alice).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def test_ed25519_of_rfc_8032(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 7.1, test 1: the empty message, which stands for the digest that is signed."""
    identity = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert identity.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    monkeypatch.setattr(keys, "digest", lambda *parts: b"")
    signature = identity.sign(b"whatever")
    assert signature.hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe"
        "24655141438e7a100b"
    )
    assert SigningKey.signed_by(identity.public, signature)
    assert not SigningKey.signed_by(identity.public, signature[:-1])
    assert not SigningKey.signed_by(identity.public[:-1], signature)


def test_hkdf_of_rfc_5869(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A.3: no salt and no information, of which the first 32 bytes."""
    monkeypatch.setattr(keys, "digest", lambda *parts: b"")
    assert derive(22 * b"\x0b").hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


@pytest.mark.parametrize(
    ("last", "block", "stream"),
    [
        (0, 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
               "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
        (0, 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
               "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
        (1, 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
               "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    ],
)  # fmt: skip
def test_chacha20_of_rfc_8439(last: int, block: int, stream: str) -> None:
    """Appendix A.1: the vectors with a nonce of zero, as words of a mask."""
    words = np.zeros(32, dtype=np.uint32)
    add_masks(words, plus=[bytes(31) + bytes([last])])
    assert words.astype("<u4").tobytes()[64 * block : 64 * block + 64].hex() == stream
    add_masks(words, minus=[bytes(31) + bytes([last])])
    assert not words.any()


@pytest.mark.parametrize("count", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_a_mask_is_one_stream_whatever_its_pieces(count: int) -> None:
    words = np.full(count, 2**32 - 1, dtype=np.uint32)
    add_masks(words, plus=[bytes(32)])
    stream = Cipher(ChaCha20(bytes(32), bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    assert np.array_equal(words, np.frombuffer(stream, dtype="<u4") - np.uint32(1))


def test_chacha20_poly1305_of_rfc_8439() -> None:
    """Section 2.8.2 with the class that `seal` uses; then `seal` itself, from a stream and an authenticator."""
    key = bytes(range(0x80, 0xA0))
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    text += b"sunscreen would be it."
    nonce, about = bytes.fromhex("070000004041424344454647"), bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    sealed = keys.ChaCha20Poly1305(key).encrypt(nonce, text, about)
    assert sealed[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(64 + 32))
    inner = bytes(a ^ b for a, b in zip(bytes(range(32)), stream[64:], strict=True))
    told = digest(b"about")
    tag = Poly1305.generate_tag(stream[:32], told + inner + (32).to_bytes(8, "little") + (32).to_bytes(8, "little"))
    assert seal(key, bytes(range(32)), b"about") == inner + tag
    assert opened(key, inner + tag, b"about") == bytes(range(32))
    assert opened(key, inner + tag, b"something else") is None


def test_secrets_come_back_as_pycryptodome_would_give_them() -> None:
    """Secrets held by different clients and wrong shares among them: all at once as one by one."""
    for threshold, count in ((2, 3), (5, 8), (22, 32)):
        secrets = [hashlib.sha256(bytes([threshold, number])).digest()[:16] for number in range(3)]
        every = [list(enumerate(split(secret, threshold, count), start=1)) for secret in (*secrets, bytes(16))]
        some = [every[0][:threshold], every[1][-threshold:], every[2][:threshold], every[3][-threshold:]]
        some.append([(1, bytes(range(16))), *every[0][1:threshold]])
        alone = [Shamir.combine(each, ssss=False) for each in some]
        assert combined([dict(each) for each in some], threshold) == alone
        assert alone[:4] == [*secrets, bytes(16)]
        assert alone[4] not in alone[:4]
        assert combined([dict(every[0])], threshold) == secrets[:1]
        with pytest.raises(ProtocolError, match=f"{threshold - 1} shares, and {threshold} are needed"):
            combined([dict(every[0]), dict(every[1][1:threshold])], threshold)
    with pytest.raises(ProtocolError, match="no sharing of 15 bytes among 3 with threshold 2"):
        split(bytes(15), 2, 3)
    with pytest.raises(ProtocolError, match="no sharing of 16 bytes among 3 with threshold 1"):
        split(bytes(16), 1, 3)


# Bytes that must never change


def fixed_roster() -> Roster:
    def member(number: int, name: str) -> Member:
        each = [bytes([16 * number + place]) for place in range(4)]
        return Member(name, 32 * each[0], 32 * each[1], 32 * each[2], 64 * each[3])

    return Roster(
        round=7,
        broadcast=bytes(range(32)),
        plan=bytes(range(32, 64)),
        threshold=3,
        colluders=1,
        bound=4.0,
        most=600,
        length=5,
        members=(member(1, "ann"), member(2, "bob"), member(3, "Zoë")),
    )


def golden_messages() -> dict[str, Message]:
    roster = fixed_roster()
    binding = bytes(range(64, 96))
    ann = roster.members[0]
    return {
        "advert": Advert(7, roster.broadcast, *ann),
        "roster": roster,
        "shares": Shares(
            7, binding, bytes(32), bytes(64), {"bob": bytes(48), "Zoë": bytes(range(48))}, {"ann": bytes(range(64))}
        ),
        "delivery": Delivery(7, binding, {"bob": bytes(range(48))}, {"bob": bytes(range(64))}, {"bob": bytes(64)}),
        "masked": Masked(7, binding, packed(np.arange(6, dtype=np.uint32) * 5000, 18)),
        "survivors": Survivors(7, binding, ("Zoë", "ann", "bob"), ("ann", "bob")),
        "agreement": Agreement(7, binding, bytes(range(64))),
        "agreed": Agreed(7, binding, {"ann": bytes(range(64)), "bob": bytes(64)}),
        "reveal": Reveal(7, binding, {"ann": bytes(range(16)), "bob": bytes(16)}),
    }


@pytest.mark.parametrize("name", SECAGG)
def test_golden_bytes(name: str) -> None:
    """Version 2 of the wire format is these bytes; a change is a new version and new golden files."""
    message = golden_messages()[name]
    stored = (GOLDEN / f"secagg-{name}.dbcl").read_bytes()
    assert encode_message(message) == stored
    assert decode_message(type(message), stored) == message


def test_golden_binding() -> None:
    roster = fixed_roster()
    assert roster.binding.hex() == "38b2696e65f718269f8272c00b880e7f94c1715fa977e4722f4478016610fb58"
    other: list[dict[str, Any]] = [
        {"round": 8},
        {"broadcast": bytes(32)},
        {"plan": bytes(32)},
        {"threshold": 2},
        {"colluders": 0},
        {"bound": 4.5},
        {"most": 601},
        {"length": 6},
        {"members": roster.members[:2]},
        *({"members": (*roster.members[:2], roster.members[2]._replace(**change))} for change in (
            {"name": "zoe"}, {"identity": bytes(32)}, {"share_key": bytes(32)}, {"mask_key": bytes(32)},
            {"signature": bytes(64)},
        )),
    ]  # fmt: skip
    assert len({roster.binding, *(replace(roster, **change).binding for change in other)}) == len(other) + 1


def test_golden_masks() -> None:
    """Known answers for the two kinds of mask, the commitment and the digests of shares."""
    roster = fixed_roster()
    one, two = KeyPair(bytes(range(16))), KeyPair(bytes(16))
    names = ("ann", "bob")
    pair = derive(one.agree(two.public), *pairwise(roster, names, "ann", "bob"))
    assert pair == derive(two.agree(one.public), *pairwise(roster, names, "bob", "ann"))
    own = derive(bytes(range(16)), b"own mask", roster.binding, b"ann")
    words = np.zeros(4, dtype=np.uint32)
    add_masks(words, plus=[pair])
    assert words.tolist() == [3510524595, 3225668067, 2012112243, 127248193]
    words[:] = 0
    add_masks(words, plus=[own])
    assert words.tolist() == [1123339397, 1960438206, 2023401878, 3101129200]
    assert (
        committed(roster.binding, "ann", bytes(16)).hex()
        == "61ff96375d2c4ba96686936c1d66f061b97043a2f936a29df2f339d3d5b694d3"
    )
    assert (
        digest(share_digests(roster.binding, "ann", "bob", bytes(range(32)))).hex()
        == "d17f27114b0c227d97026c0484fb78131728c296f650204726930ce9091c8bad"
    )
    others = [("ann", "bob", "Zoë"), ("ann",), ("bob", "ann")]
    assert pairwise(roster, names, "ann", "bob") not in [pairwise(roster, own, "ann", "bob") for own in others]


@pytest.mark.parametrize("name", SECAGG)
def test_mutated_messages_are_refused_with_a_short_reason(name: str) -> None:
    """As for all messages: a `ProtocolError` that can be shown, or a message that can be written again."""
    message, rng, wrong, refused = golden_messages()[name], random.Random(0), [], 0
    for _ in range(400):
        data = fuzz.mutated(encode_message(message), rng)
        try:
            read = decode_message(type(message), data)
            wrong.append("" if decode_message(type(message), encode_message(read)) == read else "not the same again")
        except DbclError as error:
            wrong.append(fuzz.wrong_with(error))
            refused += 1
    assert set(wrong) == {""}
    assert refused > 300


def test_a_message_is_not_another() -> None:
    for name, message in golden_messages().items():
        for other, kind in golden_messages().items():
            if name != other:
                with pytest.raises(ProtocolError, match=f"{other}: expected, but these bytes are a {name}"):
                    decode_message(type(kind), encode_message(message))
