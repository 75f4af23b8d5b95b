"""Where a GPU finds every page. Addresses of a CPU's memory serve as well."""

from __future__ import annotations

import torch

from rekindle.pool.homes import Homes


def test_places_and_berths_are_found_by_number_in_every_layer() -> None:
    kv = [torch.zeros(4, 2, 8) for _ in range(3)]  # three places and the scratch page
    copies = [torch.zeros(2, 8) for _ in range(3)]
    homes = Homes(kv, berths=5)
    berth = homes.take(tuple(copy.data_ptr() for copy in copies))
    assert berth >= 4
    addresses = homes.of([2, berth, 3])
    assert addresses.tolist() == [
        [layer[2].data_ptr(), copy.data_ptr(), layer[3].data_ptr()] for layer, copy in zip(kv, copies, strict=True)
    ]


def test_a_berth_that_changed_hands_before_the_device_knew_it_has_the_last_address() -> None:
    homes = Homes([torch.zeros(2, 2, 8)], berths=1)
    berth = homes.take((111,))
    homes.give_back(berth)
    assert homes.take((222,)) == berth
    homes.send()
    assert int(homes.table[0, berth]) == 222


def test_every_berth_can_be_had_and_no_two_are_the_same() -> None:
    homes = Homes([torch.zeros(2, 2, 8)], berths=9)
    taken = [homes.take((i,)) for i in range(9)]
    assert sorted(taken) == list(range(2, 11))
    assert homes.of(taken).tolist() == [list(range(9))]
