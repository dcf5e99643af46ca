//! Host verbs without hardware: every work request is copied, and completes.
//!
//! No byte of guest memory is touched. A SEND to a QP of the same context uses up its oldest
//! receive, so that both directions of the path from guest ring to guest CQ are there: for
//! benchmarks, which compare this with a bare loop, and for tests, which inject through [`Faults`]
//! what a real RNIC cannot be made to do at will. The device that is named `null` is one of these.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;
use vhost_rdma_engine::link::{Gid, is_multicast};
use vhost_rdma_memory::ContiguousMapping;
use virtio_rdma_abi::{self as abi, attr_mask, opcode, qps, send_flags, wc_opcode, wc_status};

use super::faults::{Call, Faults};
use super::verbs::{
    Data, HostAh, HostDomain, HostError, HostEvent, HostGid, HostLimits, HostMr, HostMw,
    HostObjects, HostPart, HostPd, HostPort, HostQp, HostSrq, HostVerbs, HostWc, Keeps, MadeAh,
    PostError, QpInit, RecvBurst, Registered, Result, SendBurst, SendWr, Subject,
};

/// Entries of the CQ.
const CQ_ENTRIES: u32 = 32 << 10;
/// Completions of one poll.
const POLL: usize = 32;

#[derive(Debug)]
struct NullQp {
    qpn: u32,
    state: u8,
    dest_qpn: u32,
    srq: Option<HostSrq>,
    receives: VecDeque<u64>,
}

/// Where objects of these contexts are: in no memory of a library.
const NOWHERE: (usize, usize) = (0, 0);

/// A protection domain, for as long as there is anything in it.
#[derive(Debug)]
struct Domain(Faults);

impl Drop for Domain {
    fn drop(&mut self) {
        self.0.script().live.pds -= 1;
    }
}

/// A registration.
#[derive(Debug)]
struct Region {
    domain: Arc<Domain>,
    _mapping: Arc<ContiguousMapping>,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.domain.0.take_time();
        self.domain.0.script().live.mrs -= 1;
    }
}

/// An address handle.
#[derive(Debug)]
struct Handle {
    domain: Arc<Domain>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.domain.0.script().live.ahs -= 1;
    }
}

impl HostDomain for Arc<Domain> {
    fn register(&self, mapping: Arc<ContiguousMapping>, _: u64, _: u32) -> Result<Registered> {
        self.0.take_time();
        self.0.check(Call::Register)?;
        self.0.script().live.mrs += 1;
        let key = self.0.number() << 8;
        let region = Region { domain: self.clone(), _mapping: mapping };
        let host = HostPart::new(NOWHERE, region);
        Ok(Registered { lkey: key, rkey: key, host })
    }

    fn create_ah(&self, av: &abi::Av) -> Result<MadeAh> {
        self.0.take_time();
        self.0.check(Call::CreateAh)?;
        self.0.script().live.ahs += 1;
        let host = HostPart::new(NOWHERE, Handle { domain: self.clone() });
        Ok(MadeAh { destination: av.dgid, host })
    }
}

/// See the module.
#[derive(Debug)]
pub struct Null {
    faults: Faults,
    limits: HostLimits,
    pds: Slab<Arc<Domain>>,
    mrs: Slab<Registered>,
    mws: Slab<()>,
    ahs: Slab<MadeAh>,
    /// QPs in groups.
    groups: BTreeMap<Gid, Vec<HostQp>>,
    srqs: Slab<VecDeque<u64>>,
    qps: Slab<NullQp>,
    done: VecDeque<HostWc>,
    /// Where work requests are copied to.
    copy: Vec<SendWr>,
    wake: File,
    watch: Option<Box<dyn Keeps>>,
}

fn handle(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Null {
    /// A context whose faults are `faults`.
    ///
    /// # Errors
    /// The host refuses an eventfd.
    pub fn new(faults: Faults) -> io::Result<Self> {
        let wake = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        faults.take_time();
        faults.script().contexts += 1;
        let many = 1 << 20;
        Ok(Self {
            faults,
            limits: HostLimits {
                page_size_cap: 0x7fff_f000,
                max_mr_size: u64::MAX,
                max_qp: many,
                max_qp_wr: 16 << 10,
                max_sge: 32,
                max_sge_rd: 32,
                max_inline: 512,
                max_cq: many,
                max_cqe: CQ_ENTRIES,
                max_mr: many,
                max_mw: many,
                max_pd: many,
                max_ah: many,
                max_srq: many,
                max_srq_wr: 16 << 10,
                max_srq_sge: 32,
                max_qp_rd_atom: 128,
                max_qp_init_rd_atom: 128,
                local_ca_ack_delay: 15,
                atomics: true,
                invalidate: true,
                windows_1: true,
                windows_2: true,
                max_mcast_groups: many,
                max_mcast_qps: many,
                ..HostLimits::default()
            },
            pds: Slab::new(),
            mrs: Slab::new(),
            mws: Slab::new(),
            ahs: Slab::new(),
            groups: BTreeMap::new(),
            srqs: Slab::new(),
            qps: Slab::new(),
            done: VecDeque::new(),
            copy: Vec::new(),
            wake,
            watch: None,
        })
    }

    fn check(&self, call: Call) -> Result<()> {
        self.faults.check(call)
    }

    fn count(&self, change: impl FnOnce(&mut HostObjects)) {
        change(&mut self.faults.script().live);
    }

    fn qp(&mut self, qp: HostQp) -> Result<&mut NullQp> {
        self.qps.get_mut(qp.0 as usize).ok_or(HostError(libc::EINVAL))
    }

    /// Whether a work request's window and region are there, if it is about some.
    fn can_bind(&self, wr: &SendWr) -> bool {
        let Subject::Window(mw, mr) = wr.subject else { return true };
        let is_there = |mr: HostMr| {
            let region = self.mrs.get(mr.0 as usize);
            region.is_some_and(|made| made.host.address_in(NOWHERE.0).is_some())
        };
        self.mws.contains(mw.0 as usize) && mr.is_none_or(is_there)
    }

    /// Gives a message to the QPs that it is for.
    fn deliver_to_all(&mut self, wr: &SendWr, dest_qpn: u32, byte_len: u32) {
        let Subject::Ah(ah) = wr.subject else { return self.deliver(wr, dest_qpn, byte_len) };
        let group = self.ahs.get(ah.0 as usize).map(|ah| &ah.destination);
        let group = group.filter(|gid| is_multicast(gid));
        let Some(group) = group else { return self.deliver(wr, wr.rkey, byte_len) };
        let members = self.groups.get(group).into_iter().flatten();
        let members = members.filter_map(|qp| self.qps.get(qp.0 as usize)).map(|qp| qp.qpn);
        for member in members.collect::<Vec<_>>() {
            self.deliver(wr, member, byte_len);
        }
    }

    /// Uses up the oldest receive of the QP that a message is for.
    fn deliver(&mut self, wr: &SendWr, dest_qpn: u32, byte_len: u32) {
        let with_imm = matches!(wr.opcode, opcode::SEND_WITH_IMM | opcode::RDMA_WRITE_WITH_IMM);
        let takes = with_imm || matches!(wr.opcode, opcode::SEND | opcode::SEND_WITH_INV);
        if !takes {
            return;
        }
        let Some((_, qp)) = self.qps.iter_mut().find(|(_, qp)| qp.qpn == dest_qpn) else { return };
        if !matches!(qp.state, qps::RTR | qps::RTS | qps::SQD) {
            return;
        }
        let wr_id = match qp.srq {
            Some(srq) => self.srqs.get_mut(srq.0 as usize).and_then(VecDeque::pop_front),
            None => qp.receives.pop_front(),
        };
        let Some(wr_id) = wr_id else { return };
        self.done.push_back(HostWc {
            wr_id,
            opcode: if wr.opcode == opcode::RDMA_WRITE_WITH_IMM {
                wc_opcode::RECV_RDMA_WITH_IMM
            } else {
                wc_opcode::RECV
            },
            byte_len,
            qpn: dest_qpn,
            imm: wr.imm,
            with_imm,
            with_inv: wr.opcode == opcode::SEND_WITH_INV,
            ..HostWc::default()
        });
    }

    /// Puts a QP into a state.
    fn enter(&mut self, qp: HostQp, state: u8) {
        let Some(own) = self.qps.get_mut(qp.0 as usize) else { return };
        let before = std::mem::replace(&mut own.state, state);
        match state {
            qps::RESET => own.receives.clear(),
            qps::ERR => self.flush(qp),
            _ => {}
        }
        let mut script = self.faults.script();
        script.running = script.running + usize::from(runs(state)) - usize::from(runs(before));
    }

    fn flush(&mut self, qp: HostQp) {
        let Some(qp) = self.qps.get_mut(qp.0 as usize) else { return };
        let (qpn, receives) = (qp.qpn, std::mem::take(&mut qp.receives));
        self.done.extend(receives.into_iter().map(|wr_id| HostWc {
            wr_id,
            status: wc_status::WR_FLUSH_ERR,
            qpn,
            ..HostWc::default()
        }));
    }
}

const fn runs(state: u8) -> bool {
    !matches!(state, qps::RESET | qps::ERR)
}

fn byte_len(burst: &SendBurst, wr: &SendWr) -> u32 {
    match wr.data {
        Data::Inline { len, .. } => len,
        Data::Sges { first, count } => {
            let range = first as usize..(first + count) as usize;
            burst.sges.get(range).map_or(0, |sges| sges.iter().map(|sge| sge.length).sum())
        }
    }
}

impl HostVerbs for Null {
    fn limits(&self) -> &HostLimits {
        &self.limits
    }

    fn port(&mut self) -> Result<HostPort> {
        let down = self.faults.script().port_down;
        Ok(HostPort {
            state: if down { 1 } else { 4 },
            phys_state: if down { 3 } else { 5 },
            max_mtu: 5,
            active_mtu: 5,
            active_speed: 32,
            active_width: 2,
            max_msg_sz: 1 << 30,
        })
    }

    fn gids(&mut self) -> Result<Vec<HostGid>> {
        Ok(self.faults.script().gids.clone())
    }

    fn alloc_pd(&mut self) -> Result<HostPd> {
        self.check(Call::AllocPd)?;
        self.count(|live| live.pds += 1);
        Ok(HostPd(handle(self.pds.insert(Arc::new(Domain(self.faults.clone()))))))
    }

    fn free_pd(&mut self, pd: HostPd) -> Result<()> {
        self.pds.try_remove(pd.0 as usize).map(drop).ok_or(HostError(libc::EINVAL))
    }

    fn domain(&mut self, pd: HostPd) -> Result<Box<dyn HostDomain>> {
        let domain = self.pds.get(pd.0 as usize).ok_or(HostError(libc::EINVAL))?;
        Ok(Box::new(domain.clone()))
    }

    fn adopt(&mut self, region: Registered) -> HostMr {
        HostMr(handle(self.mrs.insert(region)))
    }

    fn release(&mut self, mr: HostMr) -> Result<Registered> {
        self.mrs.try_remove(mr.0 as usize).ok_or(HostError(libc::EINVAL))
    }

    fn alloc_mw(&mut self, _: HostPd, _: u32) -> Result<(HostMw, u32)> {
        self.check(Call::AllocMw)?;
        self.count(|live| live.mws += 1);
        let key = self.faults.number() << 8;
        Ok((HostMw(handle(self.mws.insert(()))), key))
    }

    fn dealloc_mw(&mut self, mw: HostMw) -> Result<()> {
        self.mws.try_remove(mw.0 as usize).ok_or(HostError(libc::EINVAL))?;
        self.count(|live| live.mws -= 1);
        Ok(())
    }

    fn adopt_ah(&mut self, ah: MadeAh) -> Result<HostAh> {
        ah.host.address_in(NOWHERE.0).ok_or(HostError(libc::EINVAL))?;
        Ok(HostAh(handle(self.ahs.insert(ah))))
    }

    fn destroy_ah(&mut self, ah: HostAh) -> Result<()> {
        self.ahs.try_remove(ah.0 as usize).map(drop).ok_or(HostError(libc::EINVAL))
    }

    fn create_srq(&mut self, _: HostPd, _: u32, _: u32) -> Result<HostSrq> {
        self.check(Call::CreateSrq)?;
        self.count(|live| live.srqs += 1);
        Ok(HostSrq(handle(self.srqs.insert(VecDeque::new()))))
    }

    fn arm_srq(&mut self, _: HostSrq, _: u32) -> Result<()> {
        Ok(())
    }

    fn destroy_srq(&mut self, srq: HostSrq) -> Result<()> {
        self.srqs.try_remove(srq.0 as usize).ok_or(HostError(libc::EINVAL))?;
        self.count(|live| live.srqs -= 1);
        Ok(())
    }

    fn create_qp(&mut self, init: &QpInit) -> Result<(HostQp, u32)> {
        self.check(Call::CreateQp)?;
        self.count(|live| live.qps += 1);
        let qpn = self.faults.number();
        let qp = NullQp {
            qpn,
            state: qps::RESET,
            dest_qpn: 0,
            srq: init.srq,
            receives: VecDeque::new(),
        };
        Ok((HostQp(handle(self.qps.insert(qp))), qpn))
    }

    fn modify_qp(&mut self, qp: HostQp, attr: &abi::QpAttr) -> Result<()> {
        self.check(Call::ModifyQp)?;
        let mask = attr.mask.get();
        let own = self.qp(qp)?;
        if mask & attr_mask::DEST_QPN != 0 {
            own.dest_qpn = attr.dest_qpn.get();
        }
        if mask & attr_mask::STATE != 0 {
            self.enter(qp, attr.qp_state);
        }
        Ok(())
    }

    fn query_qp(&mut self, qp: HostQp) -> Result<(u8, bool)> {
        self.qp(qp).map(|qp| (qp.state, false))
    }

    fn attach_mcast(&mut self, qp: HostQp, group: &Gid, _: &Gid) -> Result<()> {
        self.check(Call::AttachMcast)?;
        self.groups.entry(*group).or_default().push(qp);
        self.count(|live| live.attachments += 1);
        Ok(())
    }

    fn detach_mcast(&mut self, qp: HostQp, group: &Gid) -> Result<()> {
        let members = self.groups.get_mut(group).ok_or(HostError(libc::EINVAL))?;
        let at = members.iter().position(|&member| member == qp);
        members.swap_remove(at.ok_or(HostError(libc::EINVAL))?);
        self.count(|live| live.attachments -= 1);
        Ok(())
    }

    fn destroy_qp(&mut self, qp: HostQp) -> Result<()> {
        // IBTA o10-2.2.3.
        if self.groups.values().any(|members| members.contains(&qp)) {
            return Err(HostError(libc::EBUSY));
        }
        self.enter(qp, qps::RESET);
        self.qps.try_remove(qp.0 as usize).ok_or(HostError(libc::EINVAL))?;
        self.count(|live| live.qps -= 1);
        Ok(())
    }

    fn cq_entries(&self) -> u32 {
        CQ_ENTRIES
    }

    fn post_send(&mut self, qp: HostQp, burst: &SendBurst) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        self.check(Call::PostSend).map_err(refused)?;
        let (qpn, mut state, dest_qpn) =
            self.qp(qp).map(|qp| (qp.qpn, qp.state, qp.dest_qpn)).map_err(refused)?;
        self.copy.clear();
        self.copy.extend_from_slice(&burst.wrs);
        let failing = self.faults.script().failing.take();
        let mut failing = failing.filter(|_| !burst.wrs.is_empty());
        for wr in &burst.wrs {
            let len = byte_len(burst, wr);
            let status = match (state, failing.take()) {
                (qps::RTS, None) if self.can_bind(wr) => wc_status::SUCCESS,
                (qps::RTS, failure) => {
                    state = qps::ERR;
                    failure.unwrap_or(wc_status::MW_BIND_ERR)
                }
                _ => wc_status::WR_FLUSH_ERR,
            };
            if status == wc_status::SUCCESS {
                self.deliver_to_all(wr, dest_qpn, len);
            }
            if status != wc_status::SUCCESS || wr.flags & send_flags::SIGNALED != 0 {
                let done = HostWc { wr_id: wr.wr_id, status, qpn, ..HostWc::default() };
                self.done.push_back(done);
            }
        }
        if self.qp(qp).is_ok_and(|own| own.state != state) {
            self.enter(qp, state);
        }
        Ok(())
    }

    fn post_recv(&mut self, qp: HostQp, burst: &RecvBurst) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        self.check(Call::PostRecv).map_err(refused)?;
        let own = self.qp(qp).map_err(refused)?;
        own.receives.extend(burst.wrs.iter().map(|wr| wr.wr_id));
        if own.state == qps::ERR {
            self.flush(qp);
        }
        self.faults.script().receives += burst.wrs.len();
        Ok(())
    }

    fn post_srq(&mut self, srq: HostSrq, burst: &RecvBurst) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        self.check(Call::PostRecv).map_err(refused)?;
        let queue =
            self.srqs.get_mut(srq.0 as usize).ok_or_else(|| refused(HostError(libc::EINVAL)))?;
        queue.extend(burst.wrs.iter().map(|wr| wr.wr_id));
        self.faults.script().receives += burst.wrs.len();
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<HostWc>) -> Result<bool> {
        if self.faults.script().gone {
            return Err(HostError(libc::EIO));
        }
        let count = self.done.len().min(POLL);
        let (front, back) = self.done.as_slices();
        let of_front = count.min(front.len());
        into.extend_from_slice(&front[..of_front]);
        into.extend_from_slice(&back[..count - of_front]);
        self.done.drain(..count);
        Ok(!self.done.is_empty())
    }

    fn arm(&mut self) -> Result<()> {
        Ok(())
    }

    fn next_event(&mut self) -> Option<HostEvent> {
        self.faults.script().events.pop_front()
    }

    fn wake_fds(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.wake.try_clone()?.into()])
    }

    fn keep(&mut self, watch: Box<dyn Keeps>) {
        self.watch = Some(watch);
    }

    fn objects(&self) -> HostObjects {
        HostObjects {
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            mws: self.mws.len(),
            qps: self.qps.len(),
            srqs: self.srqs.len(),
            ahs: self.ahs.len(),
            attachments: self.groups.values().map(Vec::len).sum(),
        }
    }
}

impl Drop for Null {
    /// The end of a context is that of all that is in it.
    fn drop(&mut self) {
        self.faults.take_time();
        let mut script = self.faults.script();
        script.contexts -= 1;
        script.running -= self.qps.iter().filter(|(_, qp)| runs(qp.state)).count();
        script.live.qps -= self.qps.len();
        script.live.srqs -= self.srqs.len();
        script.live.mws -= self.mws.len();
        script.live.attachments -= self.groups.values().map(Vec::len).sum::<usize>();
    }
}
