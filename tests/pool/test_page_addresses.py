"""Where a GPU finds every page. Addresses of a CPU's memory serve as well."""

from __future__ import annotations

import torch

from rekindle.pool.page_addresses import PageAddresses


def test_places_and_host_pages_are_found_by_number_in_every_layer() -> None:
    kv = [torch.zeros(4, 2, 8) for _ in range(3)]  # three places and the scratch page
    copies = [torch.zeros(2, 8) for _ in range(3)]
    addresses = PageAddresses(kv, host_pages=5)
    host_page_id = addresses.register(tuple(copy.data_ptr() for copy in copies))
    assert host_page_id >= 4
    found = addresses.of([2, host_page_id, 3])
    assert found.tolist() == [
        [layer[2].data_ptr(), copy.data_ptr(), layer[3].data_ptr()] for layer, copy in zip(kv, copies, strict=True)
    ]


def test_a_host_page_id_that_changed_hands_before_the_device_knew_it_has_the_last_address() -> None:
    addresses = PageAddresses([torch.zeros(2, 2, 8)], host_pages=1)
    host_page_id = addresses.register((111,))
    addresses.release(host_page_id)
    assert addresses.register((222,)) == host_page_id
    addresses.send()
    assert int(addresses.table[0, host_page_id]) == 222


def test_every_host_page_id_can_be_had_and_no_two_are_the_same() -> None:
    addresses = PageAddresses([torch.zeros(2, 2, 8)], host_pages=9)
    taken = [addresses.register((i,)) for i in range(9)]
    assert sorted(taken) == list(range(2, 11))
    assert addresses.of(taken).tolist() == [list(range(9))]
