//! Host verbs on libibverbs.
//!
//! Discovery is the `ibverbs` crate's; what it does not expose goes through `ibverbs-sys`. Objects
//! live in tables, so handles are numbers and a stale one finds nothing; all pointers are freed
//! here and nowhere else, users before what they use. `ibv_post_send` and its like are inline
//! functions of C that jump through `ibv_context.ops`, and so do we (`post`).

mod convert;
mod groups;
mod node;
mod post;
mod region;

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use ibverbs_sys as ffi;
use rustix::fs::OFlags;
use slab::Slab;
use vhost_rdma_engine::link::Gid;
use virtio_rdma_abi as abi;

use self::groups::Groups;
use self::node::Node;
use self::post::{Buffers, Objects};
use self::region::{Context, Domain};
use super::open_error::OpenError;
use super::verbs::{
    HostAh, HostDomain, HostError, HostEvent, HostGid, HostLimits, HostMr, HostMw, HostObjects,
    HostPd, HostPort, HostQp, HostSrq, HostVerbs, HostWc, Keeps, MadeAh, PostError, QpInit,
    RecvBurst, Registered, Result, SendBurst,
};

/// The port that NICs use: RoCE devices have one, or one device for each.
const PORT: u8 = 1;
/// Entries of the CQ, where the device has as many.
const CQ_ENTRIES: u32 = 64 << 10;
/// Inline sizes that are tried when a device is opened; no attribute tells the greatest.
const INLINE: [u32; 6] = [512, 256, 128, 64, 32, 0];
/// Completion events that are taken at once.
const EVENTS: usize = 64;

/// One opened context. See the module.
pub(super) struct Ibverbs {
    context: *mut ffi::ibv_context,
    /// The same, which this and its registrations keep open.
    opened: Arc<Context>,
    channel: *mut ffi::ibv_comp_channel,
    cq: *mut ffi::ibv_cq,
    limits: HostLimits,
    pds: Slab<Arc<Domain>>,
    mrs: Slab<Registered>,
    mws: Slab<*mut ffi::ibv_mw>,
    ahs: Slab<MadeAh>,
    srqs: Slab<*mut ffi::ibv_srq>,
    qps: Slab<*mut ffi::ibv_qp>,
    groups: Groups,
    buffers: Buffers,
    node: Option<Node>,
    /// Whoever waits for this context's descriptors.
    watch: Option<Box<dyn Keeps>>,
}

// SAFETY: libibverbs is thread-safe, and the pointers are used through `&mut self` alone.
unsafe impl Send for Ibverbs {}

impl std::fmt::Debug for Ibverbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ibverbs").field("objects", &self.objects()).finish_non_exhaustive()
    }
}

/// The last error of the C library.
fn errno() -> HostError {
    HostError(
        io::Error::last_os_error().raw_os_error().filter(|&code| code != 0).unwrap_or(libc::EIO),
    )
}

/// What a function that returns an errno means. Some providers return -1 and set it instead.
fn check(code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code if code < 0 => Err(errno()),
        code => Err(HostError(code)),
    }
}

/// A pointer that a constructor returned.
fn made<T>(pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() { Err(errno()) } else { Ok(pointer) }
}

fn names() -> Vec<String> {
    let devices = ibverbs::devices();
    let names = devices.iter().flat_map(|list| {
        list.iter()
            .filter_map(|device| device.name().map(|name| name.to_string_lossy().into_owned()))
            .collect::<Vec<_>>()
    });
    names.collect()
}

/// Has libibverbs load its drivers: it does so once, for the devices that there are. Makes the
/// sockets for groups, too.
pub(super) fn prepare() {
    groups::prepare();
    load();
}

/// The first of the two.
pub(super) fn load() {
    let devices = names();
    tracing::debug!(?devices, "RDMA devices");
}

/// Opens a device by name.
pub(super) fn open(device: &str) -> std::result::Result<Box<dyn HostVerbs>, OpenError> {
    let failed = |action| {
        move |error: HostError| OpenError::Host {
            device: device.to_owned(),
            action,
            source: io::Error::from_raw_os_error(error.0),
        }
    };
    let context = open_context(device).map_err(failed("open it"))?;
    let Some(context) = context else {
        return Err(OpenError::NoDevice { device: device.to_owned(), present: names() });
    };
    let mut opened = Ibverbs {
        context,
        opened: Arc::new(Context::new(context)),
        channel: ptr::null_mut(),
        cq: ptr::null_mut(),
        limits: HostLimits::default(),
        pds: Slab::new(),
        mrs: Slab::new(),
        mws: Slab::new(),
        ahs: Slab::new(),
        srqs: Slab::new(),
        qps: Slab::new(),
        groups: Groups::default(),
        buffers: Buffers::default(),
        // SAFETY: the context was opened just now.
        node: unsafe { Node::of(context) },
        watch: None,
    };
    opened.limits = opened.query().map_err(failed("query it"))?;
    opened.make_cq().map_err(failed("make a completion queue"))?;
    opened.limits.max_inline = opened.probe_inline().map_err(failed("make a queue pair"))?;
    if opened.gids().map_err(failed("read its addresses"))?.is_empty() {
        return Err(OpenError::NoAddress { device: device.to_owned() });
    }
    Ok(Box::new(opened))
}

fn open_context(device: &str) -> Result<Option<*mut ffi::ibv_context>> {
    let mut count = 0;
    // SAFETY: `count` is an int that lives through the call.
    let list = made(unsafe { ffi::ibv_get_device_list(&raw mut count) })?;
    let mut found = None;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        let entry = list.wrapping_add(index);
        // SAFETY: the list has `count` entries.
        let candidate = unsafe { *entry };
        // SAFETY: an entry of the list is a device.
        let name = unsafe { ffi::ibv_get_device_name(candidate) };
        // SAFETY: its name is a string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(name) };
        if name.to_bytes() == device.as_bytes() {
            // SAFETY: as above.
            found = Some(made(unsafe { ffi::ibv_open_device(candidate) }));
            break;
        }
    }
    // SAFETY: the list is ours, and an opened device does not need it.
    unsafe { ffi::ibv_free_device_list(list) };
    found.transpose()
}

fn nonblocking(fd: c_int) -> Result<()> {
    // SAFETY: the descriptor belongs to an object that the caller holds.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| HostError(e.raw_os_error()))?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(|e| HostError(e.raw_os_error()))
}

impl Ibverbs {
    fn query(&mut self) -> Result<HostLimits> {
        let mut attr = ffi::ibv_device_attr::default();
        // SAFETY: the context is open and `attr` is what the call fills.
        check(unsafe { ffi::ibv_query_device(self.context, &raw mut attr) })?;
        Ok(convert::limits(&attr))
    }

    fn async_fd(&self) -> c_int {
        // SAFETY: the context is open until this is dropped.
        unsafe { (*self.context).async_fd }
    }

    fn channel_fd(&self) -> c_int {
        // SAFETY: the channel exists from `make_cq` on.
        unsafe { (*self.channel).fd }
    }

    fn make_cq(&mut self) -> Result<()> {
        // SAFETY: the context is open.
        self.channel = made(unsafe { ffi::ibv_create_comp_channel(self.context) })?;
        nonblocking(self.channel_fd())?;
        nonblocking(self.async_fd())?;
        let entries = CQ_ENTRIES.min(self.limits.max_cqe);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: context and channel exist; there is no CQ context.
        self.cq = made(unsafe {
            ffi::ibv_create_cq(self.context, entries, ptr::null_mut(), self.channel, 0)
        })?;
        Ok(())
    }

    /// The greatest inline size that a QP can be made with.
    fn probe_inline(&mut self) -> Result<u32> {
        let pd = self.alloc_pd()?;
        let mut last = Err(HostError(libc::EINVAL));
        for max_inline in INLINE {
            let init = QpInit {
                pd,
                kind: abi::qpt::RC,
                srq: None,
                max_send_wr: 16,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline,
            };
            last = self.create_qp(&init).map(|made| (made.0, max_inline));
            if last.is_ok() {
                break;
            }
        }
        let found = last.and_then(|(qp, max_inline)| self.destroy_qp(qp).map(|()| max_inline));
        self.free_pd(pd)?;
        found
    }

    /// The port's entries of RoCE v2.
    fn gid_table(&self) -> Result<Vec<ffi::ibv_gid_entry>> {
        let mut table = vec![ffi::ibv_gid_entry::default(); 1024];
        // SAFETY: the table has as many entries of that size as are told.
        let count = unsafe {
            ffi::_ibv_query_gid_table(
                self.context,
                table.as_mut_ptr(),
                table.len(),
                0,
                size_of::<ffi::ibv_gid_entry>(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(HostError(i32::try_from(-count).unwrap_or(libc::EIO)));
        };
        table.truncate(count);
        table.retain(|entry| {
            entry.port_num == u32::from(PORT) && entry.gid_type == ffi::IBV_GID_TYPE_ROCE_V2
        });
        Ok(table)
    }

    fn pd(&self, pd: HostPd) -> Result<*mut ffi::ibv_pd> {
        self.pds.get(pd.0 as usize).map(|domain| domain.raw()).ok_or(HostError(libc::EINVAL))
    }

    fn qp(&self, qp: HostQp) -> Result<*mut ffi::ibv_qp> {
        self.qps.get(qp.0 as usize).copied().ok_or(HostError(libc::EINVAL))
    }

    fn srq(&self, srq: HostSrq) -> Result<*mut ffi::ibv_srq> {
        self.srqs.get(srq.0 as usize).copied().ok_or(HostError(libc::EINVAL))
    }

    /// Empties the channel of completion events; the CQ is polled anyway.
    fn drain_channel(&mut self) {
        for _ in 0..EVENTS {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut::<c_void>());
            // SAFETY: the channel exists and does not block; both are filled on success.
            let code =
                unsafe { ffi::ibv_get_cq_event(self.channel, &raw mut cq, &raw mut context) };
            if code != 0 {
                return;
            }
            // SAFETY: the event was taken just now, and is acknowledged once.
            unsafe { ffi::ibv_ack_cq_events(cq, 1) };
        }
    }
}

/// An index as the pointer-sized context of an object, by which events find it.
fn as_context(index: usize) -> *mut c_void {
    ptr::without_provenance_mut(index)
}

fn handle(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn port_event(kind: ffi::ibv_event_type) -> Option<HostEvent> {
    match kind {
        ffi::IBV_EVENT_PORT_ACTIVE => Some(HostEvent::Port { active: true }),
        ffi::IBV_EVENT_PORT_ERR => Some(HostEvent::Port { active: false }),
        ffi::IBV_EVENT_GID_CHANGE => Some(HostEvent::Gids),
        ffi::IBV_EVENT_DEVICE_FATAL => Some(HostEvent::Fatal),
        ffi::IBV_EVENT_CQ_ERR => Some(HostEvent::Cq),
        _ => None,
    }
}

impl HostVerbs for Ibverbs {
    fn limits(&self) -> &HostLimits {
        &self.limits
    }

    fn port(&mut self) -> Result<HostPort> {
        let mut attr = ffi::ibv_port_attr::default();
        // SAFETY: the exported function fills what was the whole structure when it was new, which
        // is the beginning of today's.
        check(unsafe { ffi::ibv_query_port(self.context, PORT, (&raw mut attr).cast()) })?;
        Ok(convert::port(&attr))
    }

    fn gids(&mut self) -> Result<Vec<HostGid>> {
        Ok(self.gid_table()?.iter().filter_map(convert::gid).collect())
    }

    fn alloc_pd(&mut self) -> Result<HostPd> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ffi::ibv_alloc_pd(self.context) })?;
        let domain = Arc::new(Domain::new(raw, self.opened.clone()));
        Ok(HostPd(handle(self.pds.insert(domain))))
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

    fn alloc_mw(&mut self, pd: HostPd, kind: u32) -> Result<(HostMw, u32)> {
        // SAFETY: the context is open until this is dropped.
        let call = unsafe { (*self.context).ops.alloc_mw }.ok_or(HostError(libc::EOPNOTSUPP))?;
        // SAFETY: the PD is one of ours.
        let mw = made(unsafe { call(self.pd(pd)?, kind) })?;
        // SAFETY: a window that was just made.
        let key = unsafe { (*mw).rkey };
        Ok((HostMw(handle(self.mws.insert(mw))), key))
    }

    fn dealloc_mw(&mut self, mw: HostMw) -> Result<()> {
        let raw = self.mws.get(mw.0 as usize).copied().ok_or(HostError(libc::EINVAL))?;
        // SAFETY: the context is open until this is dropped.
        let call = unsafe { (*self.context).ops.dealloc_mw }.ok_or(HostError(libc::EOPNOTSUPP))?;
        // SAFETY: the window is one of ours, and leaves the table when it is gone.
        check(unsafe { call(raw) })?;
        self.mws.remove(mw.0 as usize);
        Ok(())
    }

    fn adopt_ah(&mut self, ah: MadeAh) -> Result<HostAh> {
        self.opened.handle(&ah).ok_or(HostError(libc::EINVAL))?;
        Ok(HostAh(handle(self.ahs.insert(ah))))
    }

    fn destroy_ah(&mut self, ah: HostAh) -> Result<()> {
        self.ahs.try_remove(ah.0 as usize).map(drop).ok_or(HostError(libc::EINVAL))
    }

    fn create_srq(&mut self, pd: HostPd, max_wr: u32, max_sge: u32) -> Result<HostSrq> {
        let index = self.srqs.vacant_key();
        let mut init = ffi::ibv_srq_init_attr {
            srq_context: as_context(index),
            attr: ffi::ibv_srq_attr { max_wr, max_sge: max_sge.max(1), srq_limit: 0 },
        };
        // SAFETY: the PD is one of ours, `init` lives through the call.
        let srq = made(unsafe { ffi::ibv_create_srq(self.pd(pd)?, &raw mut init) })?;
        Ok(HostSrq(handle(self.srqs.insert(srq))))
    }

    fn arm_srq(&mut self, srq: HostSrq, limit: u32) -> Result<()> {
        let mut attr = ffi::ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let mask = c_int::try_from(ffi::IBV_SRQ_LIMIT).unwrap_or(0);
        // SAFETY: the SRQ is one of ours, `attr` lives through the call.
        check(unsafe { ffi::ibv_modify_srq(self.srq(srq)?, &raw mut attr, mask) })
    }

    fn destroy_srq(&mut self, srq: HostSrq) -> Result<()> {
        // SAFETY: the SRQ is one of ours, and leaves the table when it is gone.
        check(unsafe { ffi::ibv_destroy_srq(self.srq(srq)?) })?;
        self.srqs.remove(srq.0 as usize);
        Ok(())
    }

    fn create_qp(&mut self, init: &QpInit) -> Result<(HostQp, u32)> {
        let srq = init.srq.map(|srq| self.srq(srq)).transpose()?;
        let index = self.qps.vacant_key();
        let mut attr = convert::qp_init(init)?;
        attr.qp_context = as_context(index);
        attr.send_cq = self.cq;
        attr.recv_cq = self.cq;
        attr.srq = srq.unwrap_or(ptr::null_mut());
        // SAFETY: PD, CQ and SRQ are ours, `attr` lives through the call.
        let qp = made(unsafe { ffi::ibv_create_qp(self.pd(init.pd)?, &raw mut attr) })?;
        // SAFETY: a QP that was just made.
        let qpn = unsafe { (*qp).qp_num };
        Ok((HostQp(handle(self.qps.insert(qp))), qpn))
    }

    fn modify_qp(&mut self, qp: HostQp, attr: &abi::QpAttr) -> Result<()> {
        let (mut attr, mask) = convert::qp_attr(attr)?;
        // SAFETY: the QP is one of ours, `attr` lives through the call.
        check(unsafe { ffi::ibv_modify_qp(self.qp(qp)?, &raw mut attr, mask) })
    }

    fn query_qp(&mut self, qp: HostQp) -> Result<(u8, bool)> {
        let mut attr = ffi::ibv_qp_attr::default();
        let mut init = ffi::ibv_qp_init_attr::default();
        let mask = c_int::try_from(ffi::ibv_qp_attr_mask::IBV_QP_STATE.0).unwrap_or(0);
        // SAFETY: the QP is one of ours, both structures are what the call fills.
        let code = unsafe { ffi::ibv_query_qp(self.qp(qp)?, &raw mut attr, mask, &raw mut init) };
        check(code)?;
        let state = u8::try_from(attr.qp_state).map_err(|_| HostError(libc::EIO))?;
        Ok((state, attr.sq_draining != 0))
    }

    fn destroy_qp(&mut self, qp: HostQp) -> Result<()> {
        // SAFETY: the QP is one of ours, and leaves the table when it is gone.
        check(unsafe { ffi::ibv_destroy_qp(self.qp(qp)?) })?;
        self.qps.remove(qp.0 as usize);
        Ok(())
    }

    fn attach_mcast(&mut self, qp: HostQp, group: &Gid, own: &Gid) -> Result<()> {
        let raw = self.qp(qp)?;
        let interface = self
            .gid_table()?
            .iter()
            .find(|entry| convert::gid(entry).is_some_and(|gid| gid.gid == *own))
            .map(|entry| entry.ndev_ifindex);
        self.groups.join(group, qp, (own, interface.unwrap_or(0)))?;
        let gid = ffi::ibv_gid { raw: *group };
        // SAFETY: the QP is one of ours, `gid` lives through the call.
        let attached = check(unsafe { ffi::ibv_attach_mcast(raw, &raw const gid, 0) });
        if attached.is_err() {
            self.groups.leave(group, qp);
        }
        attached
    }

    fn detach_mcast(&mut self, qp: HostQp, group: &Gid) -> Result<()> {
        let gid = ffi::ibv_gid { raw: *group };
        // SAFETY: the QP is one of ours, `gid` lives through the call.
        check(unsafe { ffi::ibv_detach_mcast(self.qp(qp)?, &raw const gid, 0) })?;
        self.groups.leave(group, qp);
        Ok(())
    }

    fn cq_entries(&self) -> u32 {
        // SAFETY: the CQ exists from `make_cq` on.
        u32::try_from(unsafe { (*self.cq).cqe }).unwrap_or(0)
    }

    fn post_send(&mut self, qp: HostQp, burst: &SendBurst) -> std::result::Result<(), PostError> {
        let raw = self.qp(qp).map_err(|error| PostError { posted: 0, error })?;
        let context = self.opened.as_ref();
        let objects = Objects { context, ahs: &self.ahs, mws: &self.mws, mrs: &self.mrs };
        self.buffers.send(self.context, raw, burst, &objects)
    }

    fn post_recv(&mut self, qp: HostQp, burst: &RecvBurst) -> std::result::Result<(), PostError> {
        let raw = self.qp(qp).map_err(|error| PostError { posted: 0, error })?;
        self.buffers.receive(self.context, raw, burst)
    }

    fn post_srq(&mut self, srq: HostSrq, burst: &RecvBurst) -> std::result::Result<(), PostError> {
        let raw = self.srq(srq).map_err(|error| PostError { posted: 0, error })?;
        self.buffers.receive_shared(self.context, raw, burst)
    }

    fn poll(&mut self, into: &mut Vec<HostWc>) -> Result<bool> {
        self.buffers.poll(self.context, self.cq, into)
    }

    fn arm(&mut self) -> Result<()> {
        post::arm(self.context, self.cq)
    }

    fn next_event(&mut self) -> Option<HostEvent> {
        self.drain_channel();
        loop {
            let mut event = ffi::ibv_async_event::default();
            // SAFETY: the context is open and its channel does not block; `event` is filled on
            // success.
            let code = unsafe { ffi::ibv_get_async_event(self.context, &raw mut event) };
            if code != 0 {
                let gone = self.node.as_ref().is_some_and(Node::is_gone);
                return gone.then_some(HostEvent::Fatal);
            }
            let found = post::event_of(&event).or_else(|| port_event(event.event_type));
            // SAFETY: the event was taken just now, and is acknowledged once.
            unsafe { ffi::ibv_ack_async_event(&raw mut event) };
            if found.is_some() {
                return found;
            }
        }
    }

    fn wake_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let own = [self.channel_fd(), self.async_fd()].into_iter();
        // SAFETY: both descriptors are open until this is dropped.
        let own = own.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned());
        own.chain(self.node.as_ref().map(Node::wake_fd)).collect()
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
            attachments: self.groups.attachments(),
        }
    }
}

impl Drop for Ibverbs {
    /// Users before what they use. What the device refuses to destroy (it is gone) goes when the
    /// kernel closes the context.
    fn drop(&mut self) {
        self.watch = None;
        for (qp, group) in self.groups.clear() {
            let gid = ffi::ibv_gid { raw: group };
            if let Ok(raw) = self.qp(qp) {
                // SAFETY: the QP is one of ours, `gid` lives through the call.
                let _ = unsafe { ffi::ibv_detach_mcast(raw, &raw const gid, 0) };
            }
        }
        // SAFETY: the context is open until the end of this.
        if let Some(call) = unsafe { (*self.context).ops.dealloc_mw } {
            for mw in self.mws.drain() {
                // SAFETY: ours, and forgotten.
                let _ = unsafe { call(mw) };
            }
        }
        for qp in self.qps.drain() {
            // SAFETY: as above.
            let _ = unsafe { ffi::ibv_destroy_qp(qp) };
        }
        for srq in self.srqs.drain() {
            // SAFETY: as above.
            let _ = unsafe { ffi::ibv_destroy_srq(srq) };
        }
        self.ahs.clear();
        self.mrs.clear();
        self.pds.clear();
        if !self.cq.is_null() {
            // SAFETY: as above; no QP uses it.
            let _ = unsafe { ffi::ibv_destroy_cq(self.cq) };
        }
        if !self.channel.is_null() {
            // SAFETY: as above; its CQ is gone.
            let _ = unsafe { ffi::ibv_destroy_comp_channel(self.channel) };
        }
    }
}
