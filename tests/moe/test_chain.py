"""The hand-over of deferred sums, without kernels."""

import gc

import pytest

from kt_kernel.moe.chain import join_chain, model_scope


class Layer:
    def __init__(self, layer_idx, settings="same"):
        self.chain = join_chain(self, layer_idx, settings)


@pytest.fixture
def layers():
    with model_scope():
        made = [Layer(i) for i in (1, 4, 5)]  # dense layers in between do not count
    return made


def test_the_next_layer_takes_and_only_once(layers):
    chain = layers[0].chain
    chain.offer(layers[0], 8, "sum")
    assert chain.take(layers[1], 8) == "sum"
    assert chain.take(layers[1], 8) is None


@pytest.mark.parametrize(("taker", "key"), [(0, 8), (2, 8), (1, 9)])
def test_others_drop_it(layers, taker, key):
    chain = layers[0].chain
    chain.offer(layers[0], 8, "sum")
    assert chain.take(layers[taker], key) is None
    assert chain.take(layers[1], 8) is None


def test_last_layer(layers):
    assert [layers[0].chain.is_last(layer) for layer in layers] == [False, False, True]


def test_chains_break_where_the_index_does_not_grow_or_settings_differ():
    main = [Layer(i) for i in range(3)]
    draft = [Layer(i) for i in range(2)]
    other = Layer(2, "other")
    assert len({id(layer.chain) for layer in main}) == 1
    assert len({id(layer.chain) for layer in (main[0], draft[0], other)}) == 3
    assert draft[0].chain is draft[1].chain


def test_scopes():
    outside = Layer(10)
    first, second = model_scope(), model_scope()
    a, b = [], []
    for i in range(3):  # two models built in turns
        with first:
            a.append(Layer(i))
        with second:
            b.append(Layer(20 + i))
    after = Layer(11)
    assert {id(layer.chain) for layer in a} == {id(a[0].chain)}
    assert {id(layer.chain) for layer in b} == {id(b[0].chain)}
    assert a[0].chain is not b[0].chain and outside.chain is after.chain
    with first:
        late = Layer(0)  # a smaller index does not matter inside
        with second:
            assert Layer(1).chain is b[0].chain
        assert Layer(1).chain is late.chain
    assert late.chain is a[0].chain


def test_a_scope_ends_after_an_error():
    with pytest.raises(KeyError), model_scope():
        inside = Layer(0)
        raise KeyError
    assert Layer(1).chain is not inside.chain


def test_dead_layers_leave_the_chain(layers):
    chain = layers[0].chain
    chain.offer(layers[0], 8, "sum")
    first, _, last = layers
    layers.clear()
    gc.collect()
    del _
    gc.collect()
    assert chain.take(last, 8) is None  # the sum was for the layer that is gone
    chain.offer(first, 8, "sum")
    assert chain.take(last, 8) == "sum" and chain.is_last(last)
