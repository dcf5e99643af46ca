//! QP attributes: what modify sets and query returns, with every value checked before any is
//! stored.

use virtio_rdma_abi::{Av, QpAttr, access, attr_mask as m, av_flags};
use zerocopy::little_endian::U32;

use super::state::{Kind, State};
use crate::nic::command::Status;
use crate::nic::limits::{MAX_RD_ATOM, MTU_ENUM};
use crate::nic::saved::{AbiBytes, BadState};

/// The Q_Key of every GSI QP (IBTA 16.1.2).
pub const GSI_QKEY: u32 = 0x8001_0000;

const RIGHTS: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND
    | access::FLUSH_GLOBAL
    | access::OPTIONAL_MASK;

/// `IB_MIG_MIGRATED`: the only path migration state of a device without path migration.
const MIGRATED: u8 = 0;

/// The attributes of a QP, in the ABI's own layout so that query returns what modify was given.
#[derive(Clone, Debug, Default)]
pub struct Attrs(QpAttr);

impl Attrs {
    /// Takes over what `new` sets, after checking all of it. `held` tells which GID indices hold an
    /// address.
    ///
    /// # Errors
    /// The status to answer; then nothing was changed.
    pub fn set(&mut self, new: &QpAttr, held: impl Fn(u16) -> bool) -> Result<(), Status> {
        check(new, held)?;
        let mask = new.mask.get();
        let own = &mut self.0;
        let mut take = |bit: u32, copy: fn(&mut QpAttr, &QpAttr)| {
            if mask & bit != 0 {
                copy(own, new);
            }
        };
        take(m::EN_SQD_ASYNC_NOTIFY, |own, new| own.en_sqd_async_notify = new.en_sqd_async_notify);
        take(m::ACCESS_FLAGS, |own, new| own.qp_access_flags = new.qp_access_flags);
        take(m::PKEY_INDEX, |own, new| own.pkey_index = new.pkey_index);
        take(m::PORT, |own, new| own.port_num = new.port_num);
        take(m::QKEY, |own, new| own.qkey = new.qkey);
        take(m::AV, |own, new| own.ah = new.ah);
        take(m::PATH_MTU, |own, new| own.path_mtu = new.path_mtu);
        take(m::TIMEOUT, |own, new| own.timeout = new.timeout);
        take(m::RETRY_CNT, |own, new| own.retry_cnt = new.retry_cnt);
        take(m::RNR_RETRY, |own, new| own.rnr_retry = new.rnr_retry);
        take(m::RQ_PSN, |own, new| own.rq_psn = psn(new.rq_psn));
        take(m::MAX_QP_RD_ATOMIC, |own, new| own.max_rd_atomic = new.max_rd_atomic);
        take(m::MIN_RNR_TIMER, |own, new| own.min_rnr_timer = new.min_rnr_timer);
        take(m::SQ_PSN, |own, new| own.sq_psn = psn(new.sq_psn));
        take(m::MAX_DEST_RD_ATOMIC, |own, new| own.max_dest_rd_atomic = new.max_dest_rd_atomic);
        take(m::DEST_QPN, |own, new| own.dest_qpn = new.dest_qpn);
        Ok(())
    }

    /// RTS→SQD: who does not ask for the event now is not told, whatever was asked for the last
    /// time. It goes with the transition (Linux, mlx4_ib, `__mlx4_ib_modify_qp`).
    pub(crate) fn begin_drain(&mut self, new: &QpAttr) {
        if new.mask.get() & m::EN_SQD_ASYNC_NOTIFY == 0 {
            self.0.en_sqd_async_notify = 0;
        }
    }

    /// See [`crate::nic::saved`].
    pub(crate) fn save(&self) -> AbiBytes {
        AbiBytes::of(&self.0)
    }

    /// What was saved.
    pub(crate) fn load(saved: &AbiBytes) -> Result<Self, BadState> {
        saved.read().map(Self)
    }

    /// The answer to QP_QUERY.
    pub fn report(&self, state: State, draining: bool) -> QpAttr {
        let mut attr = self.0;
        attr.qp_state = state.to_abi();
        attr.cur_qp_state = state.to_abi();
        attr.path_mig_state = MIGRATED;
        attr.sq_draining = u8::from(draining);
        attr
    }

    pub(crate) fn has(&self, right: u32) -> bool {
        self.0.qp_access_flags.get() & right == right
    }

    /// The primary path.
    pub const fn av(&self) -> &Av {
        &self.0.ah
    }

    pub(crate) fn dest_qpn(&self) -> u32 {
        self.0.dest_qpn.get()
    }

    /// The Q_Key that it takes; QP 1 has the standard's (IBTA 10.2.5).
    pub fn qkey(&self, kind: Kind) -> u32 {
        if kind == Kind::Gsi { GSI_QKEY } else { self.0.qkey.get() }
    }

    pub(crate) const fn min_rnr_timer(&self) -> u8 {
        self.0.min_rnr_timer
    }

    pub(crate) const fn timeout(&self) -> u8 {
        self.0.timeout
    }

    pub(crate) const fn retry_cnt(&self) -> u8 {
        self.0.retry_cnt
    }

    pub(crate) const fn rnr_retry(&self) -> u8 {
        self.0.rnr_retry
    }

    pub(crate) const fn wants_drain_event(&self) -> bool {
        self.0.en_sqd_async_notify != 0
    }
}

/// The 24 bits that a packet carries. Programs pass any 32: every provider takes the low ones.
fn psn(given: U32) -> U32 {
    U32::new(given.get() & 0x00ff_ffff)
}

fn check(new: &QpAttr, held: impl Fn(u16) -> bool) -> Result<(), Status> {
    let mask = new.mask.get();
    let has = |bit: u32| mask & bit != 0;
    if has(m::ALT_PATH) || (has(m::PATH_MIG_STATE) && new.path_mig_state != MIGRATED) {
        return Err(Status::NOTSUPP);
    }
    let bad = (has(m::ACCESS_FLAGS) && new.qp_access_flags.get() & !RIGHTS != 0)
        || (has(m::PKEY_INDEX) && new.pkey_index.get() != 0)
        || (has(m::PORT) && new.port_num != 1)
        || (has(m::PATH_MTU) && !(1..=MTU_ENUM).contains(&new.path_mtu))
        || (has(m::TIMEOUT) && new.timeout > 31)
        || (has(m::RETRY_CNT) && new.retry_cnt > 7)
        || (has(m::RNR_RETRY) && new.rnr_retry > 7)
        || (has(m::MIN_RNR_TIMER) && new.min_rnr_timer > 31)
        || (has(m::DEST_QPN) && new.dest_qpn.get() >= 1 << 24)
        || (has(m::MAX_QP_RD_ATOMIC) && new.max_rd_atomic > MAX_RD_ATOM)
        || (has(m::MAX_DEST_RD_ATOMIC) && new.max_dest_rd_atomic > MAX_RD_ATOM)
        || (has(m::AV) && check_av(&new.ah, held).is_err());
    if bad { Err(Status::INVAL) } else { Ok(()) }
}

/// Checks an address vector: RoCE always has a GRH, and the source must be an address of this port.
pub(crate) fn check_av(av: &Av, held: impl Fn(u16) -> bool) -> Result<(), Status> {
    let ok = av.flags & av_flags::GRH != 0 && av.port_num == 1 && held(av.sgid_index.get());
    if ok { Ok(()) } else { Err(Status::INVAL) }
}
