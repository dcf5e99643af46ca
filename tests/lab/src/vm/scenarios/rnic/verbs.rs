//! What must have happened on the RNIC in a test that passed: a verb that no test brings there
//! fails the run.
//!
//! A test that passes may have found its verb missing among the device's capabilities. So the
//! virtual guest writes down what the device did for it (`virtual_guest::witness`), and here is
//! what must be among that, one row each. The lists know each number of the device's document: one
//! that is new there must find its place here. Where a status is another than IBTA's,
//! `virtual_guest::backing` names rdma_rxe's file and function.

use std::collections::{BTreeMap, BTreeSet};

use crate::rows::Row;

/// Commands that an RNIC cannot be asked for (docs/RNIC.md, 3): the answer is NOTSUPP.
const COMMANDS_NOT_OFFERED: &[&str] = &["MR_ALLOC"];

/// Send opcodes, and the types of QPs on which they must have succeeded.
const REQUESTS: &[(&str, &[&str])] = &[
    ("RDMA_WRITE", &["RC", "UC"]),
    ("RDMA_WRITE_WITH_IMM", &["RC", "UC"]),
    ("SEND", &["RC", "UC", "UD", "GSI"]),
    ("SEND_WITH_IMM", &["RC", "UC", "UD"]),
    ("RDMA_READ", &["RC"]),
    ("ATOMIC_CMP_AND_SWP", &["RC"]),
    ("ATOMIC_FETCH_AND_ADD", &["RC"]),
    ("BIND_MW", &["RC"]),
    // Not offered, or with windows of type 2 only, which are not offered on rdma_rxe.
    ("SEND_WITH_INV", &[]),
    ("LOCAL_INV", &[]),
    ("REG_MR", &[]),
];

/// What else work requests and receives can be.
const WORK: &[&str] = &[
    "flag RC FENCE",
    "flag RC SOLICITED",
    "flag RC INLINE",
    "flag UC INLINE",
    "flag UD INLINE",
    "receive RECV SUCCESS",
    "receive RECV_RDMA_WITH_IMM SUCCESS",
    "receive IMM",
    "receive SRQ",
    "receive GRH",
];

/// Asynchronous events, and why one cannot come here.
const EVENTS: &[(&str, Option<&str>)] = &[
    ("CQ_ERR", None),
    ("QP_FATAL", None),
    ("QP_REQ_ERR", Some("rxe raises none: backing.rs, responder_events")),
    ("QP_ACCESS_ERR", Some("rxe raises none: backing.rs, responder_events")),
    ("COMM_EST", Some("rxe raises none: backing.rs, comm_est")),
    ("SQ_DRAINED", None),
    ("DEVICE_FATAL", None),
    ("PORT_ACTIVE", None),
    ("PORT_ERR", None),
    ("SRQ_ERR", None),
    ("SRQ_LIMIT_REACHED", None),
    ("QP_LAST_WQE_REACHED", None),
    ("GID_CHANGE", None),
];

/// Causes of errors (8.3 of the device's document), a test of each, and what that test must have
/// seen on rxe.
const CAUSES: &[(&str, &str, &str)] = &[
    (
        "local key, range",
        "errors::a_bad_local_key_is_a_local_protection_error",
        "request RC RDMA_WRITE WR_FLUSH_ERR",
    ),
    (
        "local region of another domain",
        "errors::a_region_of_another_domain_is_a_local_protection_error",
        "request RC RDMA_WRITE WR_FLUSH_ERR",
    ),
    (
        "read into a region without LOCAL_WRITE",
        "errors::a_read_into_a_region_without_local_write_is_a_local_protection_error",
        "request RC RDMA_READ LOC_PROT_ERR",
    ),
    (
        "message beyond the port's",
        "errors::a_message_longer_than_the_port_allows_is_a_length_error",
        "request RC RDMA_WRITE LOC_LEN_ERR",
    ),
    (
        "datagram beyond the MTU",
        "ud_gsi::a_datagram_larger_than_the_mtu_is_refused_at_the_sender",
        "request UD SEND SUCCESS",
    ),
    (
        "malformed request",
        "errors::malformed_requests_are_local_operation_errors",
        "request RC RDMA_WRITE LOC_QP_OP_ERR",
    ),
    (
        "opcode of another transport: UC",
        "uc::reads_and_atomics_are_not_for_uc",
        "request UC RDMA_READ LOC_QP_OP_ERR",
    ),
    (
        "opcode of another transport: UD",
        "ud_gsi::rdma_is_not_for_datagrams",
        "request UD RDMA_WRITE LOC_QP_OP_ERR",
    ),
    (
        "address handle of another domain",
        "ud_gsi::an_address_handle_of_another_domain_is_refused",
        "request UD SEND LOC_QP_OP_ERR",
    ),
    (
        "receive too small",
        "errors::a_receive_that_is_too_small_breaks_both_ends",
        "request RC SEND REM_OP_ERR",
    ),
    (
        "receive too small, at the receiver",
        "errors::a_receive_that_is_too_small_breaks_both_ends",
        "receive RECV LOC_QP_OP_ERR",
    ),
    (
        "receive with a bad element",
        "errors::a_receive_with_a_bad_element_breaks_both_ends",
        "request RC SEND REM_OP_ERR",
    ),
    (
        "receive with a bad element, at the receiver",
        "errors::a_receive_with_a_bad_element_breaks_both_ends",
        "receive RECV LOC_QP_OP_ERR",
    ),
    (
        "remote key, range",
        "errors::a_bad_remote_key_is_a_remote_access_error",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
    (
        "remote region of another domain",
        "errors::a_remote_region_of_another_domain_is_a_remote_access_error",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
    (
        "right missing on the region: WRITE",
        "errors::each_remote_right_is_needed_on_the_region",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
    (
        "right missing on the region: READ",
        "errors::each_remote_right_is_needed_on_the_region",
        "request RC RDMA_READ REM_ACCESS_ERR",
    ),
    (
        "right missing on the region: FETCH_AND_ADD",
        "errors::each_remote_right_is_needed_on_the_region",
        "request RC ATOMIC_FETCH_AND_ADD REM_ACCESS_ERR",
    ),
    (
        "right missing on the region: CMP_AND_SWP",
        "errors::each_remote_right_is_needed_on_the_region",
        "request RC ATOMIC_CMP_AND_SWP REM_ACCESS_ERR",
    ),
    (
        "right missing on the QP: WRITE",
        "errors::each_remote_right_is_needed_on_the_queue_pair",
        "request RC RDMA_WRITE REM_INV_REQ_ERR",
    ),
    (
        "right missing on the QP: READ",
        "errors::each_remote_right_is_needed_on_the_queue_pair",
        "request RC RDMA_READ REM_INV_REQ_ERR",
    ),
    (
        "right missing on the QP: FETCH_AND_ADD",
        "errors::each_remote_right_is_needed_on_the_queue_pair",
        "request RC ATOMIC_FETCH_AND_ADD REM_INV_REQ_ERR",
    ),
    (
        "misaligned atomic",
        "atomics::a_misaligned_atomic_is_an_invalid_request",
        "request RC ATOMIC_FETCH_AND_ADD REM_INV_REQ_ERR",
    ),
    (
        "no receive",
        "rnr_timeout::rnr_retry_zero_fails_at_once",
        "request RC SEND RNR_RETRY_EXC_ERR",
    ),
    (
        "no answer",
        "rnr_timeout::ack_timeouts_towards_a_destroyed_peer_last_as_specified",
        "request RC RDMA_WRITE RETRY_EXC_ERR",
    ),
    ("a bind that is not allowed", "keys::a_bind_is_checked", "request RC BIND_MW MW_BIND_ERR"),
    (
        "sends after an error",
        "errors::everything_is_flushed_in_posting_order",
        "request RC SEND WR_FLUSH_ERR",
    ),
    (
        "receives after an error",
        "errors::everything_is_flushed_in_posting_order",
        "receive RECV WR_FLUSH_ERR",
    ),
    (
        "UC: no receive",
        "uc::a_message_without_a_receive_is_dropped_and_the_next_one_arrives",
        "receive RECV SUCCESS",
    ),
    (
        "UC: remote key",
        "uc::a_write_through_a_bad_key_is_dropped_and_hurts_nobody",
        "request UC RDMA_WRITE SUCCESS",
    ),
    (
        "UD: receive too small",
        "ud_gsi::a_receive_that_is_too_small_is_there_for_the_next_datagram",
        "request UD SEND SUCCESS",
    ),
    ("UD: wrong Q_Key", "ud_gsi::a_wrong_qkey_is_dropped_silently", "request UD SEND SUCCESS"),
    (
        "protection: another guest's key",
        "protection::a_key_of_another_guest_opens_nothing_over_ones_own_connections",
        "request RC RDMA_READ REM_ACCESS_ERR",
    ),
    (
        "protection: another guest's key, as a local one",
        "protection::a_key_of_another_guest_is_no_local_key",
        "request RC RDMA_READ LOC_PROT_ERR",
    ),
    (
        "protection: stale key",
        "protection::a_key_is_dead_once_its_region_is",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
    (
        "protection: out of range",
        "protection::a_key_ends_where_its_region_does",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
    (
        "protection: read-only",
        "protection::a_region_is_open_to_what_it_was_given_and_to_nothing_else",
        "request RC RDMA_WRITE REM_ACCESS_ERR",
    ),
];

/// Facts, each with the tests in which it happened.
#[derive(Debug, Default)]
pub(super) struct Seen {
    facts: BTreeMap<String, BTreeSet<String>>,
    known: BTreeSet<String>,
}

impl Seen {
    /// Adds what the tests of `suite` wrote down, of those that `passed` alone.
    pub(super) fn add(&mut self, suite: &str, text: &str, passed: &BTreeSet<String>) {
        for (test, fact) in text.lines().filter_map(|line| line.split_once('\t')) {
            let test = format!("{suite}::{test}");
            if let Some(number) = fact.strip_prefix("known ") {
                self.known.insert(number.to_owned());
            } else if passed.contains(&test) {
                self.facts.entry(fact.to_owned()).or_default().insert(test);
            }
        }
    }

    fn times(&self, fact: &str) -> usize {
        self.facts.get(fact).map_or(0, BTreeSet::len)
    }

    /// A row for what must have happened: in how many tests it did.
    fn must(&self, name: &str, fact: &str) -> Row {
        counted(name, self.times(fact), |n| n > 0)
    }

    /// One row for each thing that must have happened, or must not.
    pub(super) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        let of = |table: &str| -> Vec<&str> {
            self.known.iter().filter_map(|known| known.strip_prefix(table)).collect()
        };
        for name in of("command ") {
            let done = format!("command {name} OK");
            if COMMANDS_NOT_OFFERED.contains(&name) {
                rows.push(self.must(
                    &format!("verb: {name} is not offered"),
                    &format!("command {name} NOTSUPP"),
                ));
                rows.extend(self.listed_wrongly(&done));
            } else {
                rows.push(self.must(&format!("verb: {name}"), &done));
            }
        }
        for name in of("request ") {
            match REQUESTS.iter().find(|(opcode, _)| *opcode == name) {
                None => rows.push(unlisted(name)),
                Some((_, [])) => {
                    let done =
                        ["RC", "UC", "UD"].map(|kind| format!("request {kind} {name} SUCCESS"));
                    rows.extend(done.iter().filter_map(|done| self.listed_wrongly(done)));
                }
                Some((_, kinds)) => rows.extend(kinds.iter().map(|kind| {
                    self.must(
                        &format!("verb: {name} on {kind}"),
                        &format!("request {kind} {name} SUCCESS"),
                    )
                })),
            }
        }
        rows.extend(WORK.iter().map(|fact| self.must(&format!("verb: {fact}"), fact)));
        for name in of("event ") {
            let came = format!("event {name}");
            match EVENTS.iter().find(|(event, _)| *event == name) {
                None => rows.push(unlisted(name)),
                Some((_, None)) => rows.push(self.must(&came, &came)),
                Some((_, Some(_))) => rows.extend(self.listed_wrongly(&came)),
            }
        }
        for (cause, test, fact) in CAUSES {
            let there = self.facts.get(*fact).is_some_and(|tests| tests.contains(*test));
            let ended = fact.rsplit(' ').next().unwrap_or_default();
            rows.push(counted(&format!("error: {cause}: {ended}"), there.into(), |n| n > 0));
        }
        if self.known.is_empty() {
            rows.push(counted("verb: what the virtual guest wrote down", 0, |n| n > 0));
        }
        rows
    }

    /// A row, and a failure, if it happened although the lists say that it cannot.
    fn listed_wrongly(&self, fact: &str) -> Option<Row> {
        let times = self.times(fact);
        (times > 0).then(|| {
            let name = format!("{fact}, which is listed as what cannot be");
            Row { target: "=0".to_owned(), ..counted(&name, times, |n| n == 0) }
        })
    }
}

fn unlisted(name: &str) -> Row {
    counted(&format!("verb: {name} is on no list"), 0, |n| n > 0)
}

fn counted(name: &str, tests: usize, good: impl Fn(usize) -> bool) -> Row {
    Row {
        value: Some(tests as f64),
        unit: "tests".to_owned(),
        target: ">0".to_owned(),
        ..Row::verdict(name, good(tests))
    }
}
