//! Tests of the virtual guest that cannot pass on an RNIC, each with what decides that.
//!
//! They are few: where only a status or an event differs, the test takes what the backing gives and
//! looks at all the rest (`virtual_guest::backing`, which names rdma_rxe's file and function). A
//! test that fails and is not here is a failure; so is one that is here and passes.

/// Tests that cannot pass, and why.
pub(super) const KNOWN: &[(&str, &str)] = &[
    ("hostile::floods::fast_registrations_without_end", NO_FAST_REGISTRATION),
    (
        "responder_classes::reliable_requests_for_memory_that_is_not_open_are_refused",
        RECEIVE_BEFORE_KEY,
    ),
    ("responder_classes::unreliable_requests_that_fail_consume_nothing", RECEIVE_BEFORE_KEY),
];

const RECEIVE_BEFORE_KEY: &str = "rdma_rxe takes the receive of a message before it looks at the \
    message's key and length, and completes it with the error (rxe_resp.c, check_resource)";
const NO_FAST_REGISTRATION: &str = "MR_ALLOC is not offered (docs/RNIC.md, 3)";
