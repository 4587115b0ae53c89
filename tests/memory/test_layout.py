from __future__ import annotations

import json
from math import ceil

import pytest

from plait.errors import ConfigError
from plait.memory.layout import CacheGroup, CacheLayout, group_blocks, make_layout
from plait.ops.spec import LayerCache

FULL = LayerCache(8, 128, 128)


def window(tokens, heads=8):
    return LayerCache(heads, 128, 128, tokens)


def gemma(layers, window_tokens=512):
    """Five windowed layers, then a full one, and so on."""
    return [FULL if (i + 1) % 6 == 0 else window(window_tokens) for i in range(layers)]


def test_equal_layers_are_one_group_without_padding():
    layout = make_layout([FULL] * 32, bytes_per_number=2)
    assert [group.layers for group in layout.groups] == [tuple(range(32))]
    assert layout.block_bytes == 32 * 16 * 8 * (128 + 128) * 2
    assert layout.waste_bytes_per_block == 0


def test_five_to_one_pattern_becomes_five_windowed_groups_and_a_full_one():
    layout = make_layout(gemma(18))
    assert sorted(group.cache.window for group in layout.groups) == [0, 512, 512, 512, 512, 512]
    assert layout.group_layers == 3
    assert layout.waste_bytes_per_block == 0


def test_group_size_needs_the_fewest_pool_bytes_then_the_fewest_groups():
    """22 windowed and 4 full layers: sizes 1 and 2 need the fewest blocks alike, 2 makes fewer groups."""
    layers, context, chunk = gemma(26), 4096, 512

    def bytes_and_groups(size):
        counts = [ceil(22 / size), ceil(4 / size)]
        blocks = [min(context // 16, ceil((511 + chunk) / 16) + 1), context // 16]
        return size * sum(c * b for c, b in zip(counts, blocks, strict=True)), sum(counts)

    layout = make_layout(layers, context_tokens=context, chunk_tokens=chunk)
    best = min(range(1, 27), key=bytes_and_groups)
    assert (layout.group_layers, len(layout.groups)) == (best, bytes_and_groups(best)[1]) == (2, 13)


def test_group_size_follows_the_served_context():
    """Two full and four or five windowed layers; within the window, 4 blocks of context cost the same in each.

    Four: sizes 1 and 2 need 6 layer slots per block, size 4 needs 8, and size 2 makes fewer groups. Five: size 1
    needs 7, size 2 needs 8.
    """
    assert make_layout([FULL] * 2 + [window(1024)] * 4, context_tokens=64).group_layers == 2
    assert make_layout([FULL] * 2 + [window(1024)] * 5, context_tokens=64).group_layers == 1
    # At 1M tokens full blocks are what counts, but size 7 would pad a second windowed group for the eighth layer.
    windowed, full = 3, (1 << 20) // 16  # ceil((15 + 16) / 16) + 1 blocks
    by_size = {size: size * (-(-7 // size) * full + -(-8 // size) * windowed) for size in range(1, 9)}
    layout = make_layout([FULL] * 7 + [window(16)] * 8, context_tokens=1 << 20, chunk_tokens=16)
    assert layout.group_layers == min(by_size, key=by_size.get) == 1
    assert make_layout([FULL] * 7 + [window(16)] * 7, context_tokens=1 << 20).group_layers == 7


def test_every_layer_has_exactly_one_slot():
    layout = make_layout(gemma(26))
    slots = [layout.slot(layer) for layer in range(26)]
    assert len(set(slots)) == 26
    for layer, (g, slot) in enumerate(slots):
        assert layout.groups[g].layers[slot] == layer
        assert slot < layout.group_layers
    with pytest.raises(KeyError):
        layout.slot(26)


def test_the_last_group_of_a_kind_is_padded_and_the_waste_is_counted():
    """Five layers in groups of 2: the third group has one empty slot of 16 tokens * 2048 numbers * 4 bytes."""
    cache = FULL
    groups = (CacheGroup((0, 1), cache, 16), CacheGroup((2, 3), cache, 16), CacheGroup((4,), cache, 16))
    layout = CacheLayout(groups, 2, 16 * 2048 * 4, 4)
    assert [layout.group_waste_bytes(group) for group in groups] == [0, 0, 16 * 2048 * 4]
    assert layout.waste_bytes_per_block == 16 * 2048 * 4 / 3
    assert layout.waste_bytes(160) == 10 * 16 * 2048 * 4


@pytest.mark.parametrize(
    ("heads", "block_tokens", "waste_rows"),
    [(8, 16, 0), (4, 32, 0), (2, 64, 0), (6, 16, 32), (3, 40, 8), (5, 24, 8), (7, 16, 16)],
)
def test_narrow_rows_have_more_tokens_per_block_in_steps_of_half_a_block(heads, block_tokens, waste_rows):
    """The wide kind has 8 heads * 16 tokens = 128 head rows per slot; the narrow one fills heads * tokens of them."""
    layout = make_layout([FULL, LayerCache(heads, 128, 128, 7)])
    narrow = layout.groups[1]
    assert narrow.block_tokens == block_tokens
    assert layout.group_waste_bytes(narrow) == waste_rows * 256 * 4
    assert 128 - heads * block_tokens == waste_rows


def test_a_latent_layer_counts_its_one_key_row():
    assert LayerCache(1, 576, 0).numbers_per_token == 576
    assert make_layout([LayerCache(1, 576, 0)] * 61, bytes_per_number=2).block_bytes == 61 * 16 * 576 * 2


@pytest.mark.parametrize("window_tokens", [1, 2, 16, 17, 100])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_windowed_bound_covers_every_alignment(window_tokens, chunk):
    """At any point a step's queries n .. n + chunk - 1 see keys n - window + 1 .. n + chunk - 1: count their blocks."""
    group = CacheGroup((0,), window(window_tokens), 16)
    for n in range(400):
        first = max(n - window_tokens + 1, 0)
        held = (n + chunk - 1) // 16 - first // 16 + 1
        assert held <= group_blocks(group, n + chunk, chunk)


def test_without_recycling_a_window_saves_nothing():
    group = CacheGroup((0,), window(32), 16)
    assert group_blocks(group, 1000, None) == 63
    assert group_blocks(group, 1000, 16) == ceil((31 + 16) / 16) + 1 == 4
    assert group_blocks(group, 20, 16) == 2


def test_layout_survives_json():
    layout = make_layout(gemma(18))
    assert CacheLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("layers", "options"),
    [([], {}), ([LayerCache(0, 64, 64)], {}), ([LayerCache(1, 64, 64, -1)], {}), ([FULL], {"block_tokens": 0})],
)
def test_a_layout_that_holds_nothing_is_refused(layers, options):
    with pytest.raises(ConfigError):
        make_layout(layers, **options)
