//! The QP state machine: which transition takes which attributes (docs/virtio-rdma.md §8.2; IBTA
//! 10.3; Linux drivers/infiniband/core/verbs.c, qp_state_table).

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{self as abi, attr_mask as m, qps, qpt};

use crate::nic::Status;

/// A QP type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// QP 1: general services.
    Gsi,
}

impl Kind {
    pub(crate) const fn from_abi(kind: u32) -> Option<Self> {
        match kind {
            qpt::RC => Some(Self::Rc),
            qpt::UC => Some(Self::Uc),
            qpt::UD => Some(Self::Ud),
            qpt::GSI => Some(Self::Gsi),
            _ => None,
        }
    }

    /// Connected to one peer.
    pub const fn is_connected(self) -> bool {
        matches!(self, Self::Rc | Self::Uc)
    }
}

/// A QP state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum State {
    /// RESET: it does nothing.
    #[default]
    Reset,
    /// INIT: receives may be posted.
    Init,
    /// RTR: it receives.
    Rtr,
    /// RTS: it sends, too.
    Rts,
    /// SQD: sending is drained.
    Sqd,
    /// SQE: a send of an unreliable QP failed.
    Sqe,
    /// ERR: everything posted is flushed.
    Err,
}

impl State {
    /// The state of that number, if there is one.
    pub const fn from_abi(state: u8) -> Option<Self> {
        match state {
            qps::RESET => Some(Self::Reset),
            qps::INIT => Some(Self::Init),
            qps::RTR => Some(Self::Rtr),
            qps::RTS => Some(Self::Rts),
            qps::SQD => Some(Self::Sqd),
            qps::SQE => Some(Self::Sqe),
            qps::ERR => Some(Self::Err),
            _ => None,
        }
    }

    pub(crate) const fn to_abi(self) -> u8 {
        match self {
            Self::Reset => qps::RESET,
            Self::Init => qps::INIT,
            Self::Rtr => qps::RTR,
            Self::Rts => qps::RTS,
            Self::Sqd => qps::SQD,
            Self::Sqe => qps::SQE,
            Self::Err => qps::ERR,
        }
    }

    /// Inbound requests are executed.
    pub(crate) const fn receives(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }
}

/// Attributes that a transition must and may carry, beside STATE.
struct Rule {
    required: u32,
    optional: u32,
}

const fn rule(required: u32, optional: u32) -> Option<Rule> {
    Some(Rule { required, optional })
}

const CONNECTED_INIT: u32 = m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS;
const RC_RTS: u32 =
    m::CUR_STATE | m::ACCESS_FLAGS | m::ALT_PATH | m::PATH_MIG_STATE | m::MIN_RNR_TIMER;
const UC_RTS: u32 = m::CUR_STATE | m::ACCESS_FLAGS | m::ALT_PATH | m::PATH_MIG_STATE;
const UD_RTS: u32 = m::CUR_STATE | m::QKEY;
const UC_RTR: u32 = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN;
const RC_SQD: u32 = m::PORT
    | m::AV
    | m::TIMEOUT
    | m::RETRY_CNT
    | m::RNR_RETRY
    | m::MAX_QP_RD_ATOMIC
    | m::MAX_DEST_RD_ATOMIC
    | m::ALT_PATH
    | m::ACCESS_FLAGS
    | m::PKEY_INDEX
    | m::MIN_RNR_TIMER
    | m::PATH_MIG_STATE;

fn find(kind: Kind, from: State, to: State) -> Option<Rule> {
    use Kind::{Gsi, Rc, Uc, Ud};
    use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    match (from, to, kind) {
        (_, Reset | Err, _) => rule(0, 0),
        (Reset, Init, Rc | Uc) => rule(CONNECTED_INIT, 0),
        (Reset, Init, Ud) => rule(m::PKEY_INDEX | m::PORT | m::QKEY, 0),
        (Reset, Init, Gsi) => rule(m::PKEY_INDEX | m::QKEY, 0),
        (Init, Init, Rc | Uc) => rule(0, CONNECTED_INIT),
        (Init, Init, Ud) => rule(0, m::PKEY_INDEX | m::PORT | m::QKEY),
        (Init, Init | Rtr, Gsi) | (Init, Rtr, Ud) => rule(0, m::PKEY_INDEX | m::QKEY),
        (Init, Rtr, Rc) => rule(
            UC_RTR | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER,
            m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX,
        ),
        (Init, Rtr, Uc) => rule(UC_RTR, m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX),
        (Rtr, Rts, Rc) => {
            rule(m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC, RC_RTS)
        }
        (Rtr, Rts, Uc) => rule(m::SQ_PSN, UC_RTS),
        (Rtr, Rts, Ud | Gsi) => rule(m::SQ_PSN, UD_RTS),
        (Rts | Sqd, Rts, Rc) => rule(0, RC_RTS),
        (Rts | Sqd, Rts, Uc) => rule(0, UC_RTS),
        (Rts | Sqd | Sqe, Rts, Ud | Gsi) => rule(0, UD_RTS),
        (Sqe, Rts, Uc) => rule(0, m::CUR_STATE | m::ACCESS_FLAGS),
        (Rts, Sqd, _) => rule(0, m::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd, Rc) => rule(0, RC_SQD),
        (Sqd, Sqd, Uc) => {
            rule(0, m::AV | m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX | m::PATH_MIG_STATE)
        }
        (Sqd, Sqd, Ud | Gsi) => rule(0, m::PKEY_INDEX | m::QKEY),
        _ => None,
    }
}

/// Whether a QP of this kind may go from `from` to `to` with exactly these attributes.
pub(crate) fn allows(kind: Kind, from: State, to: State, mask: u32) -> bool {
    find(kind, from, to).is_some_and(|Rule { required, optional }| {
        mask & required == required && mask & !(required | optional | m::STATE) == 0
    })
}

/// The states that a change of attributes goes from and to, if QPs of this kind may make it (IBTA
/// 10.3).
pub fn change(kind: Kind, from: State, attr: &abi::QpAttr) -> Result<(State, State), Status> {
    let mask = attr.mask.get();
    let to = if mask & m::STATE != 0 {
        State::from_abi(attr.qp_state).ok_or(Status::INVAL)?
    } else {
        from
    };
    let wrong = mask & m::CUR_STATE != 0 && State::from_abi(attr.cur_qp_state) != Some(from);
    if wrong || !allows(kind, from, to, mask) { Err(Status::INVAL) } else { Ok((from, to)) }
}
