//! What carries the NICs under test, and what that decides by itself.
//!
//! Statuses and events of errors are those of IBTA wherever the daemon's own engine or an RNIC
//! decides that follows it. rdma_rxe does not always: where it differs, [`RXE`] says how, with the
//! place in its source (Linux 6.12, `drivers/infiniband/sw/rxe`) that decides it. So a test of an
//! error looks at everything else on rxe too: that no byte moved, who goes to ERR, what is flushed.

use crate::daemon::backing;
use crate::spec::status;

/// How a backing decides what is not the device's own to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Status of a request whose own buffer has a bad key, range or right.
    pub local_protection: u8,
    /// Such an error leaves an unreliable QP in SQE, where it goes on receiving; else it is in ERR.
    pub send_errors_end_in_sqe: bool,
    /// Status of a request that the responder's QP does not enable.
    pub not_enabled: u8,
    /// A message longer than the receive: the status of the sender, and of the receiver.
    pub long_message: [u8; 2],
    /// Status of a receive with a bad element.
    pub bad_receive: u8,
    /// Elements of receives of an SRQ are checked in the SRQ's domain; else in the QP's.
    pub srq_has_a_domain: bool,
    /// The responder of a refused access raises QP_ACCESS_ERR, and of a malformed request
    /// QP_REQ_ERR.
    pub responder_events: bool,
    /// The first message in RTR raises COMM_EST.
    pub comm_est: bool,
    /// Status of a datagram that is larger than the MTU.
    pub long_datagram: u8,
    /// A datagram longer than the receive completes it, with LOC_LEN_ERR; else it is dropped.
    pub short_datagram_receive_fails: bool,
    /// The IPv4 header of a datagram to the same host has its checksum.
    pub header_has_a_checksum: bool,
    /// The completion of a datagram says which version its header has; else it tells that of the
    /// NIC's first address.
    pub header_version_is_told: bool,
    /// A completion says whether its message was solicited; else each one counts as that.
    pub solicited_is_told: bool,
    /// A misaligned atomic is refused by the responder; else the device knows better than to send
    /// it, with the same status.
    pub misaligned_atomic_is_sent: bool,
    /// Keys and QPNs are random; else they are the hardware's.
    pub numbers_are_random: bool,
    /// Networks have groups of their own; else a peer entry names those that a network may use.
    pub groups_end_with_the_network: bool,
    /// A window opens no more of its region than it was bound to.
    pub windows_have_bounds: bool,
    /// A region that is registered anew keeps its keys.
    pub rereg_keeps_the_key: bool,
    /// What comes in is counted.
    pub inbound_is_counted: bool,
    /// Atomics hold against CPUs of the guest.
    pub atomic_against_cpus: bool,
    /// A key for all of memory is good for every QP of the kernel; else for QP 1 only.
    pub dma_key_is_for_all: bool,
    /// A QP that is connected to itself, and breaks itself, says why; else its request may be
    /// flushed instead.
    pub own_error_is_told: bool,
    /// Packets of a connection name the QP that they come from; else only the address.
    pub packets_name_their_qp: bool,
    /// A receive that is posted ends the wait of a sender that found none; else the timer does.
    pub rnr_wait_ends_early: bool,
    /// A `retry_cnt` of seven is seven retries; else it is no end of them.
    pub seven_retries_end: bool,
    /// A UC QP ends after some requests with wrong keys; else it drops them for ever.
    pub wrong_keys_end_uc: bool,
    /// The longest message of the port, at least.
    pub message: u32,
    /// A guest that stood still goes on with its connections; else they are in ERR.
    pub pause_keeps_connections: bool,
    /// A region is mapped into the daemon run by run, out of a budget of 16384; else it is a table
    /// of its pages.
    pub regions_are_mapped: bool,
    /// Registered memory stays there, pinned, when its file is cut or punched; else accesses find
    /// what the file has.
    pub memory_is_pinned: bool,
    /// QPs that can be in one group.
    pub group_members: usize,
    /// Requests move bytes; else they complete, and that is all.
    pub moves_data: bool,
    /// A connection to where nobody may be reached is refused where it is made; else it is answered
    /// by silence.
    pub strangers_are_refused: bool,
}

impl Rules {
    /// Whether a request that ends with `expected` may end with `got` on a QP that is connected to
    /// itself.
    pub fn own_error(&self, got: u8, expected: u8) -> bool {
        got == expected || !self.own_error_is_told && got == status::WR_FLUSH_ERR
    }
}

/// IBTA, and the daemon's own engine.
pub const IBTA: Rules = Rules {
    local_protection: status::LOC_PROT_ERR,
    send_errors_end_in_sqe: true,
    not_enabled: status::REM_ACCESS_ERR,
    long_message: [status::REM_INV_REQ_ERR, status::LOC_LEN_ERR],
    bad_receive: status::LOC_PROT_ERR,
    srq_has_a_domain: true,
    responder_events: true,
    comm_est: true,
    long_datagram: status::LOC_LEN_ERR,
    short_datagram_receive_fails: false,
    header_has_a_checksum: true,
    header_version_is_told: true,
    solicited_is_told: true,
    misaligned_atomic_is_sent: true,
    numbers_are_random: true,
    groups_end_with_the_network: true,
    windows_have_bounds: true,
    rereg_keeps_the_key: true,
    inbound_is_counted: true,
    atomic_against_cpus: true,
    dma_key_is_for_all: true,
    own_error_is_told: true,
    packets_name_their_qp: true,
    rnr_wait_ends_early: true,
    seven_retries_end: true,
    wrong_keys_end_uc: true,
    message: 1 << 30,
    pause_keeps_connections: true,
    regions_are_mapped: false,
    memory_is_pinned: false,
    group_members: 64,
    moves_data: true,
    strangers_are_refused: false,
};

/// Any RNIC of the host: what libibverbs does not tell, and what docs/RNIC.md says that an RNIC
/// decides.
pub const RNIC: Rules = Rules {
    // ConnectX completes it in error, against class D.
    short_datagram_receive_fails: true,
    header_version_is_told: false,
    solicited_is_told: false,
    misaligned_atomic_is_sent: false,
    numbers_are_random: false,
    groups_end_with_the_network: false,
    rereg_keeps_the_key: false,
    inbound_is_counted: false,
    atomic_against_cpus: false,
    dma_key_is_for_all: false,
    // RoCE v2: the BTH has the destination's QPN, and nothing has the source's.
    packets_name_their_qp: false,
    pause_keeps_connections: false,
    wrong_keys_end_uc: false,
    // A requester waits as long as the NAK said.
    rnr_wait_ends_early: false,
    regions_are_mapped: true,
    memory_is_pinned: true,
    strangers_are_refused: true,
    ..IBTA
};

/// The daemon's null device (vhost-rdma/rnic/src/null.rs), which looks at no key and finds no fault
/// with any request.
pub const NULL: Rules = Rules { moves_data: false, ..RNIC };

/// rdma_rxe.
pub const RXE: Rules = Rules {
    // rxe_req.c, rxe_requester, at `err`: rxe_qp_error() first, and then rxe_comp.c, rxe_completer
    // finds a QP in ERR and flush_send_queue() completes the request with WR_FLUSH_ERR like those
    // behind it. (What fails when the answer comes, rxe_comp.c, do_read, is LOC_PROT_ERR.)
    local_protection: status::WR_FLUSH_ERR,
    // rxe_qp.c, rxe_qp_error: ERR for every type; nothing sets SQE.
    send_errors_end_in_sqe: false,
    // rxe_resp.c, check_op_valid: RESPST_ERR_UNSUPPORTED_OPCODE, which rxe_receiver answers by
    // AETH_NAK_INVALID_REQ.
    not_enabled: status::REM_INV_REQ_ERR,
    // rxe_mr.c, copy_data: more than what is left of the receive is EINVAL; rxe_resp.c,
    // send_data_in makes that RESPST_ERR_MALFORMED_WQE, and rxe_receiver of that
    // AETH_NAK_REM_OP_ERR and LOC_QP_OP_ERR.
    long_message: [status::REM_OP_ERR, status::LOC_QP_OP_ERR],
    // The same way: lookup_mr() or rxe_mr_copy() fails in copy_data.
    bad_receive: status::LOC_QP_OP_ERR,
    // rxe_resp.c, send_data_in: copy_data(qp->pd, …).
    srq_has_a_domain: false,
    // rxe_resp.c, do_class_ac_error: a NAK and ERR; no IB_EVENT_QP_ACCESS_ERR and no
    // IB_EVENT_QP_REQ_ERR anywhere in rxe.
    responder_events: false,
    // Nor an IB_EVENT_COMM_EST.
    comm_est: false,
    // rxe_req.c, rxe_requester: not sent, and completed with success (IBTA C10-93.1.1).
    long_datagram: status::SUCCESS,
    // rxe_resp.c, rxe_resp_check_length and rxe_receiver, at RESPST_ERR_LENGTH: dropped where there
    // is no SRQ.
    short_datagram_receive_fails: false,
    // rxe_resp.c, check_rkey: mr_check_range() of the region, whatever the window's address and
    // length.
    windows_have_bounds: false,
    // rxe_net.c, prepare_ipv4_hdr leaves it to ip_local_out(), which rxe_loopback passes by.
    header_has_a_checksum: false,
    // rxe_resp.c, rxe_receiver, at RESPST_ERROR: rxe_qp_error() behind the NAK; rxe_comp.c,
    // rxe_completer, which may run later, drops the responses to a QP in ERR (drain_resp_pkts) and
    // flushes what they were for.
    own_error_is_told: false,
    // rxe_comp.c, rxe_completer, at COMPST_ERROR_RETRY: retry_cnt is counted down unless it is 7.
    seven_retries_end: false,
    // rxe_param.h, RXE_MAX_MCAST_QP_ATTACH.
    group_members: 56,
    // rxe_param.h, RXE_PORT_MAX_MSG_SZ.
    message: 0x80_0000,
    ..RNIC
};

/// The rules of the backing under test. RNICs other than rxe are taken to follow IBTA.
pub fn rules() -> &'static Rules {
    match backing().strip_prefix("rnic:") {
        None => &IBTA,
        Some(device) if device.starts_with("rxe") => &RXE,
        Some(device) if device.starts_with("null") => &NULL,
        Some(_) => &RNIC,
    }
}
