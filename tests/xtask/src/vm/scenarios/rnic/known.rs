//! Tests of the virtual guest that rdma_rxe decides otherwise than IBTA and our engine do, each with the place that decides it.
//!
//! A test that fails and is not here is a failure; so is one that is here and passes.

/// Tests that cannot pass on rdma_rxe, and what decides that.
pub(super) const KNOWN: &[(&str, &str)] = &[
    ("rc::counters_grow_by_the_bytes_that_moved", INBOUND),
    ("rc::the_first_message_in_rtr_raises_comm_est_and_is_received", NO_COMM_EST),
    ("errors::a_bad_local_key_is_a_local_protection_error", FLUSHED),
    ("errors::a_deregistered_key_is_dead", FLUSHED),
    ("errors::a_region_of_another_domain_is_a_local_protection_error", FLUSHED),
    ("errors::a_bad_remote_key_is_a_remote_access_error", SILENT),
    ("errors::a_remote_region_of_another_domain_is_a_remote_access_error", SILENT),
    ("errors::each_remote_right_is_needed_on_the_region", SILENT),
    ("errors::each_remote_right_is_needed_on_the_queue_pair", NOT_ENABLED),
    (
        "errors::a_receive_that_is_too_small_breaks_both_ends",
        "rxe_resp.c, send_data_in: ENOSPC is RESPST_ERR_MALFORMED_WQE, hence REM_OP_ERR and LOC_QP_OP_ERR",
    ),
    (
        "errors::a_receive_with_a_bad_element_breaks_both_ends",
        "rxe_resp.c, rxe_receiver: RESPST_ERR_MALFORMED_WQE completes with LOC_QP_OP_ERR",
    ),
    (
        "srq::receive_buffers_are_checked_in_the_domain_of_the_srq",
        "rxe_resp.c, send_data_in: checked in the domain of the QP",
    ),
    ("uc::a_send_error_leads_to_sqe_and_receives_go_on", FLUSHED),
    (
        "ud_gsi::a_datagram_arrives_with_its_ipv4_header",
        "rxe_net.c, rxe_loopback: the header of a packet to the same host never gets its checksum",
    ),
    (
        "ud_gsi::a_datagram_larger_than_the_mtu_is_refused_at_the_sender",
        "rxe_req.c, rxe_requester: drops it and completes with success (IBTA C10-93.1.1)",
    ),
    (
        "ud_gsi::a_receive_that_is_too_small_fails_at_the_receiver_only",
        "rxe_resp.c, rxe_receiver: a datagram that does not fit is dropped where there is no SRQ",
    ),
    ("events::an_event_carries_its_object_and_context", SILENT),
    ("events::comm_est_comes_once", NO_COMM_EST),
    ("events::without_buffers_each_object_keeps_one_event_of_each_type", NO_COMM_EST),
    ("cq_arm::an_error_is_not_kept_waiting", UNMODERATED),
    ("cq_arm::moderated_events_wait_for_the_count_or_the_period", UNMODERATED),
    (
        "cq_arm::solicited_arming_waits_for_a_solicited_message",
        "libibverbs does not tell whether a message was solicited (docs/RNIC.md, 3)",
    ),
    (
        "ud_gsi::a_datagram_between_ipv6_addresses_has_an_ipv6_header",
        "ibv_wc does not tell the version of the header; the NIC's first address decides (docs/RNIC.md, 3)",
    ),
    ("atomics::the_device_says_that_its_atomics_hold_against_cpus_and_they_do", AMONG_QPS),
    ("atomics::compare_and_swap_is_atomic_against_a_cpu_that_also_swaps", AMONG_QPS),
    ("memory::a_dma_key_covers_guest_physical_memory_and_is_the_kernels_alone", NOT_OFFERED),
    ("ud_gsi::gsi_belongs_to_the_kernel_and_exists_once", NOT_OFFERED),
    ("ud_gsi::gsi_is_queue_pair_one_and_carries_management_datagrams", NOT_OFFERED),
    ("ud_gsi::gsi_works_with_a_dma_key", NOT_OFFERED),
    (
        "isolation::another_network_is_out_of_reach_even_with_the_right_numbers",
        "refused where the connection is made (docs/RNIC.md, 2), not answered by silence",
    ),
];

const NO_COMM_EST: &str = "rxe_resp.c, rxe_receiver: no COMM_EST";
const UNMODERATED: &str = "CQ_MODERATE is not offered (docs/RNIC.md, 3)";
const AMONG_QPS: &str =
    "an RNIC claims IBV_ATOMIC_HCA: among its QPs, not against CPUs (docs/RNIC.md, 3)";
/// What libibverbs does not pass on.
const NOT_OFFERED: &str = "no GSI QP and no DMA key on an RNIC (docs/RNIC.md, 3)";
/// What comes in passes no software of ours.
const INBOUND: &str = "the RNIC counts what comes in, not the daemon (docs/RNIC.md, 4)";
const FLUSHED: &str = "rxe_req.c, rxe_requester: a local fault is rxe_qp_error() first, and rxe_comp.c, flush_send_wqe completes it with WR_FLUSH_ERR";
const SILENT: &str = "rxe_resp.c, do_class_ac_error: a NAK, and no QP_ACCESS_ERR";
const NOT_ENABLED: &str = "rxe_resp.c, check_rkey: an operation that the QP does not enable is RESPST_ERR_UNSUPPORTED_OPCODE, hence REM_INV_REQ_ERR";
