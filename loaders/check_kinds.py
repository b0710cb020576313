"""What ``omni data check`` can find: each kind with its level, its meaning in a few words, and the mend.

A PROBLEM loses or changes samples, or will do so; a NOTE is read right here, and may surprise elsewhere. What
is wrong is said by the code that reads shards, not here: ``kind_of`` only sorts its messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from loaders.index import REPEATED
from omni_pipeline.core.sample import Modality

PROBLEM, NOTE = "problem", "note"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding.

    Args:
        name: Of it, in JSON.
        level: PROBLEM or NOTE.
        counts: What is counted: shards, samples, keys or members.
        title: What is wrong, in a few words.
        mend: What to do about it.
    """

    name: str
    level: str
    counts: str
    title: str
    mend: str


_INDEX = "run `omni data index` on these shards"
_ALL = (
    Kind("unreadable", PROBLEM, "shards", "cannot be read", "do as each message says"),
    Kind(
        "stuck",
        PROBLEM,
        "shards",
        "reading the headers never ends, or kills the process",
        "unpack the shard, take out the member that does it, and pack it again",
    ),
    Kind("compressed", PROBLEM, "shards", "compressed", "unpack each to a plain .tar (`gunzip`, `unzstd`)"),
    Kind("stale_index", PROBLEM, "shards", "the index is stale", f"{_INDEX}; copy with `cp -p`, `rsync -t`"),
    Kind("index_version", PROBLEM, "shards", "the index has another version", _INDEX),
    Kind("damaged_index", PROBLEM, "shards", "the index is damaged", _INDEX),
    Kind(
        "wrong_index",
        PROBLEM,
        "shards",
        "the index says otherwise than the shard, though size and time fit",
        "fetch the shards again if they were damaged since, then run `omni data index --force` on them",
    ),
    Kind(
        "cut",
        PROBLEM,
        "shards",
        "cut inside a member",
        "write or fetch the shard again; what is before is read",
    ),
    Kind(
        "no_end_mark",
        PROBLEM,
        "shards",
        "no end mark: cut, or its writer was not closed",
        "write or fetch the shard again; close the writer",
    ),
    Kind(
        "garbage",
        PROBLEM,
        "shards",
        "something that is no member, and all behind it is lost",
        "write or fetch the shard again",
    ),
    Kind(
        "joined",
        PROBLEM,
        "shards",
        "members behind the end mark are not read",
        "join tars with `tar --concatenate`, not with `cat`; if none were joined, fetch the shard again",
    ),
    Kind(
        "no_such_member",
        PROBLEM,
        "fields",
        "no sample has a member for this field",
        "name a suffix that exists in the layout",
    ),
    Kind(
        "missing_member",
        PROBLEM,
        "samples",
        "lack a member of the layout",
        "add the member, or leave the sample out with --fix",
    ),
    Kind(
        "no_partner",
        PROBLEM,
        "samples",
        "lack a member that nearly all others have",
        "add the member; if these are meant to lack it, name the layout with --layout or --run",
    ),
    Kind(
        "repeated_member",
        PROBLEM,
        "members",
        "same key and suffix twice",
        "give each sample a key of its own; which of them belongs to it cannot be known",
    ),
    Kind(
        "dotted_name",
        PROBLEM,
        "members",
        "a dot in the name is taken for the start of the suffix",
        "rename: the key ends at the first dot of the file name",
    ),
    Kind(
        "empty_member",
        PROBLEM,
        "members",
        "media of no bytes",
        "write the file again, or leave it out with --fix",
    ),
    Kind(
        "sparse_member",
        PROBLEM,
        "members",
        "sparse: not in one piece",
        "write the tar again without `tar --sparse`",
    ),
    Kind(
        "bad_header",
        PROBLEM,
        "members",
        "the header cannot be read",
        "replace the file, or leave it out with --fix",
    ),
    Kind("bad_text", PROBLEM, "members", "text that is not UTF-8", "convert the text to UTF-8"),
    Kind(
        "no_size",
        PROBLEM,
        "members",
        "the model cannot take media of this shape or length",
        "crop or cut the media, or raise the limit that the message names",
    ),
    Kind(
        "too_many_pixels",
        PROBLEM,
        "members",
        "more pixels than are decoded",
        "raise loader.max_image_pixels, or make the picture smaller",
    ),
    Kind(
        "not_fetched",
        PROBLEM,
        "members",
        "the bytes cannot be read from the store",
        "check the disk, the network and the store, then check again",
    ),
    Kind(
        "not_decoded",
        PROBLEM,
        "members",
        "decoding fails",
        "replace the file, or leave it out with --fix",
    ),
    Kind(
        "decode_stuck",
        PROBLEM,
        "members",
        "decoding never ends, or kills the process",
        "replace the file, or leave it out with --fix",
    ),
    Kind("no_index", NOTE, "shards", "without an index", _INDEX),
    Kind(
        "not_adjacent",
        NOTE,
        "keys",
        "members of a key are not adjacent",
        "sort by name when packing (`tar --sort=name`): other readers make half samples of these",
    ),
    Kind(
        "key_in_shards",
        NOTE,
        "keys",
        "the same key in several shards",
        "none here: a sample is known by shard and key; in a deny-list write SHARD/KEY",
    ),
    Kind(
        "case_of_key",
        NOTE,
        "keys",
        "keys that differ by case only are different samples",
        "rename, if they are meant to be one sample",
    ),
    Kind(
        "rare_suffix",
        NOTE,
        "members",
        "a longer suffix than nearly all others have",
        "rename, if the first dot is part of the name",
    ),
    Kind(
        "empty_text",
        NOTE,
        "members",
        "text, or a member that is no media, of no bytes",
        "none, if that is meant",
    ),
    Kind("empty_shard", NOTE, "shards", "no samples", "remove the shard"),
    Kind(
        "unknown_suffix",
        NOTE,
        "members",
        "no kind of media has this suffix; passed by",
        "none, if no sample needs them; else name the file of their encoder with --encoder",
    ),
    Kind(
        "link",
        NOTE,
        "members",
        "links and devices are passed by",
        "pack the files themselves (`tar --dereference --hard-dereference`)",
    ),
    Kind("odd_name", NOTE, "members", "the name is no UTF-8", "rename, to have the same name everywhere"),
    Kind(
        "outside_path",
        NOTE,
        "members",
        "an absolute path, or one with `..`",
        "none here: nothing is unpacked; pack from within the folder",
    ),
    Kind("text_bom", NOTE, "members", "text begins with a byte order mark", "none here: it is left out"),
    Kind("text_nul", NOTE, "members", "text holds NUL characters", "remove them: they are trained on"),
    Kind("long_text", NOTE, "members", "very long text", "cut it: a sample is in one pack or in none"),
    Kind(
        "fits_no_pack",
        NOTE,
        "samples",
        "too large for a pack of the run",
        "raise the limit that the message names, or let the run leave them out",
    ),
)
KINDS_OF_FINDING = {kind.name: kind for kind in _ALL}
"""All kinds by name, problems first, in the order of the report."""

_BEGINNINGS = (
    ("shard is compressed", "compressed"),
    ("shard has no index", "no_index"),
    ("index is stale", "stale_index"),
    ("index has version", "index_version"),
    ("index ", "damaged_index"),
    ("cut inside member", "cut"),
    ("ends without an end mark", "no_end_mark"),
    ("no tar header", "garbage"),
    ("header cannot be read at byte", "garbage"),
    ("data after the end mark", "joined"),
    ("symbolic link", "link"),
    ("hard link", "link"),
    ("no regular file", "link"),
    ("name is no UTF-8", "odd_name"),
    ("sparse member", "sparse_member"),
    ("member is empty", "empty_member"),
    (REPEATED, "repeated_member"),
)


def kind_of(message: str, modality: Modality | None = None) -> str:
    """Return the kind of what a reader of shards says.

    Args:
        message: Of a ``ShardError``, a ``TarScan`` or an index.
        modality: Of the member it is about; None for a shard.
    """
    for beginning, kind in _BEGINNINGS:
        if message.startswith(beginning):
            return kind
    if modality is None:
        return "unreadable"
    return "bad_text" if modality is Modality.TEXT else "bad_header"
