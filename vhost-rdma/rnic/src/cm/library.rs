//! The host's connection manager, by librdmacm. It is loaded when it is first wanted, so neither
//! the build nor a daemon that never meets a third-party host needs it.
//!
//! The structures are those of `rdma/rdma_cma.h` as far as they are looked at, whose layout is that
//! of librdmacm.so.1 since its first release; `ibv_qp_attr` is ibverbs-sys's.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::RawFd;
use std::ptr;

use ibverbs_sys::{ibv_qp_attr, ibv_qp_state};
use libloading::Library;
use vhost_rdma_engine::cm::message::{Ends, Offer};
use vhost_rdma_engine::link::Gid;

use super::terminate::{Answer, Ask, Event, HostCm, Key, Refused};
use crate::ways::Agreed;

const SONAME: &str = "librdmacm.so.1";
const PS_TCP: c_int = 0x0106;
/// How long an address and a route may take to be found, in milliseconds.
const RESOLVE_MS: c_int = 3000;
const BACKLOG: c_int = 128;
/// Address families (`AF_INET`, `AF_INET6`), as wide as they are in socket addresses.
const INET: libc::sa_family_t = 2;
const INET6: libc::sa_family_t = 10;
/// Private data of an active REQ and of a REP, at most.
const REQ_PRIVATE: usize = 56;
const REP_PRIVATE: usize = 196;
const REJ_PRIVATE: usize = 148;

/// `enum rdma_cm_event_type`.
mod kind {
    pub(super) const ADDR_RESOLVED: i32 = 0;
    pub(super) const ADDR_ERROR: i32 = 1;
    pub(super) const ROUTE_RESOLVED: i32 = 2;
    pub(super) const ROUTE_ERROR: i32 = 3;
    pub(super) const CONNECT_REQUEST: i32 = 4;
    pub(super) const CONNECT_RESPONSE: i32 = 5;
    pub(super) const CONNECT_ERROR: i32 = 6;
    pub(super) const UNREACHABLE: i32 = 7;
    pub(super) const REJECTED: i32 = 8;
    pub(super) const ESTABLISHED: i32 = 9;
    pub(super) const DISCONNECTED: i32 = 10;
    pub(super) const DEVICE_REMOVAL: i32 = 11;
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ConnParam {
    private_data: *const c_void,
    private_data_len: u8,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: u8,
    retry_count: u8,
    rnr_retry_count: u8,
    srq: u8,
    qp_num: u32,
}

/// `struct rdma_cm_id`, up to the addresses of its route.
#[repr(C)]
struct CmId {
    verbs: *mut c_void,
    channel: *mut EventChannel,
    context: *mut c_void,
    qp: *mut c_void,
    src: libc::sockaddr_storage,
    dst: libc::sockaddr_storage,
}

/// `struct rdma_event_channel`.
#[repr(C)]
struct EventChannel {
    fd: c_int,
}

/// `struct rdma_cm_event`; of its union only what connections have.
#[repr(C)]
struct CmEvent {
    id: *mut CmId,
    listen_id: *mut CmId,
    event: c_int,
    status: c_int,
    conn: ConnParam,
}

type Made = unsafe extern "C" fn() -> *mut EventChannel;
type CreateId =
    unsafe extern "C" fn(*mut EventChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
type OfId = unsafe extern "C" fn(*mut CmId) -> c_int;
type ResolveAddr =
    unsafe extern "C" fn(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
type WithInt = unsafe extern "C" fn(*mut CmId, c_int) -> c_int;
type WithParam = unsafe extern "C" fn(*mut CmId, *mut ConnParam) -> c_int;
type Reject = unsafe extern "C" fn(*mut CmId, *const c_void, u8) -> c_int;
type Bind = unsafe extern "C" fn(*mut CmId, *mut libc::sockaddr) -> c_int;
type GetEvent = unsafe extern "C" fn(*mut EventChannel, *mut *mut CmEvent) -> c_int;
type AckEvent = unsafe extern "C" fn(*mut CmEvent) -> c_int;
type InitQpAttr = unsafe extern "C" fn(*mut CmId, *mut ibv_qp_attr, *mut c_int) -> c_int;

struct Functions {
    create_event_channel: Made,
    create_id: CreateId,
    destroy_id: OfId,
    resolve_addr: ResolveAddr,
    resolve_route: WithInt,
    connect: WithParam,
    establish: OfId,
    accept: WithParam,
    reject: Reject,
    disconnect: OfId,
    bind_addr: Bind,
    listen: WithInt,
    get_cm_event: GetEvent,
    ack_cm_event: AckEvent,
    init_qp_attr: InitQpAttr,
    _library: Library,
}

impl Functions {
    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: librdmacm's initialisers have no preconditions.
        let library = unsafe { Library::new(SONAME) }?;
        macro_rules! symbol {
            ($name:literal) => {{
                // SAFETY: the type that it is assigned to is the prototype of rdma/rdma_cma.h.
                let symbol = unsafe { library.get($name) }?;
                *symbol
            }};
        }
        Ok(Self {
            create_event_channel: symbol!(b"rdma_create_event_channel\0"),
            create_id: symbol!(b"rdma_create_id\0"),
            destroy_id: symbol!(b"rdma_destroy_id\0"),
            resolve_addr: symbol!(b"rdma_resolve_addr\0"),
            resolve_route: symbol!(b"rdma_resolve_route\0"),
            connect: symbol!(b"rdma_connect\0"),
            establish: symbol!(b"rdma_establish\0"),
            accept: symbol!(b"rdma_accept\0"),
            reject: symbol!(b"rdma_reject\0"),
            disconnect: symbol!(b"rdma_disconnect\0"),
            bind_addr: symbol!(b"rdma_bind_addr\0"),
            listen: symbol!(b"rdma_listen\0"),
            get_cm_event: symbol!(b"rdma_get_cm_event\0"),
            ack_cm_event: symbol!(b"rdma_ack_cm_event\0"),
            init_qp_attr: symbol!(b"rdma_init_qp_attr\0"),
            _library: library,
        })
    }
}

/// Loads librdmacm for good. Whoever wants it later finds out if there is none.
pub(crate) fn prepare() {
    // SAFETY: librdmacm's initialisers have no preconditions.
    if let Ok(library) = unsafe { Library::new(SONAME) } {
        std::mem::forget(library);
    }
}

/// A connection of librdmacm's.
struct Id {
    id: *mut CmId,
    /// Until its route is there.
    ask: Option<Ask>,
}

/// librdmacm, with one channel for all connections.
pub(super) struct HostLibrary {
    functions: Functions,
    channel: *mut EventChannel,
    ids: BTreeMap<Key, Id>,
    by_id: BTreeMap<usize, Key>,
    listeners: Vec<*mut CmId>,
}

// SAFETY: the pointers are librdmacm's, which may be called from any thread; this value is used by
// one at a time.
unsafe impl Send for HostLibrary {}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub(super) enum LibraryError {
    #[error("{0}; install librdmacm1")]
    Missing(#[from] libloading::Error),
    #[error("cannot {0}: {1}")]
    Refused(&'static str, std::io::Error),
}

fn refused(action: &'static str) -> LibraryError {
    LibraryError::Refused(action, std::io::Error::last_os_error())
}

/// 0 is success, and everything else errno's.
fn done(result: c_int) -> Result<(), Refused> {
    if result == 0 {
        return Ok(());
    }
    tracing::debug!(error = %std::io::Error::last_os_error(), "librdmacm refuses");
    Err(Refused)
}

/// An address as librdmacm takes it; IPv4 as such, or it would be looked for among IPv6 routes.
fn storage(gid: &Gid, port: u16) -> libc::sockaddr_storage {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let at: *mut libc::sockaddr_storage = storage.as_mut_ptr();
    match std::net::IpAddr::from(*gid).to_canonical() {
        std::net::IpAddr::V4(v4) => {
            let mut address: libc::sockaddr_in = zeroed();
            address.sin_family = INET;
            address.sin_port = port.to_be();
            address.sin_addr.s_addr = u32::from_ne_bytes(v4.octets());
            // SAFETY: a `sockaddr_storage` has room and alignment for every socket address.
            unsafe { at.cast::<libc::sockaddr_in>().write(address) };
        }
        std::net::IpAddr::V6(v6) => {
            let mut address: libc::sockaddr_in6 = zeroed();
            address.sin6_family = INET6;
            address.sin6_port = port.to_be();
            address.sin6_addr.s6_addr = v6.octets();
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(address) };
        }
    }
    // SAFETY: all zeroes are a valid one, and what was written over them too.
    unsafe { storage.assume_init() }
}

trait Zeroes {}
impl Zeroes for libc::sockaddr_in {}
impl Zeroes for libc::sockaddr_in6 {}
impl Zeroes for ibv_qp_attr {}

/// A C structure of numbers, all zero.
fn zeroed<T: Zeroes>() -> T {
    // SAFETY: the types that have this trait are valid when they are all zero.
    unsafe { MaybeUninit::<T>::zeroed().assume_init() }
}

fn end_of(storage: &libc::sockaddr_storage) -> Option<(Gid, u16)> {
    let at: *const libc::sockaddr_storage = storage;
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what is there.
            let address = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let v4 = std::net::Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes());
            Some((v4.to_ipv6_mapped().octets(), u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says what is there.
            let address = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            Some((address.sin6_addr.s6_addr, u16::from_be(address.sin6_port)))
        }
        _ => None,
    }
}

fn param(offer: &Offer, private: &[u8], most: usize) -> ConnParam {
    let len = private.len().min(most);
    ConnParam {
        private_data: private.as_ptr().cast(),
        private_data_len: u8::try_from(len).unwrap_or(0),
        responder_resources: offer.responder_resources,
        initiator_depth: offer.initiator_depth,
        flow_control: offer.flow_control.into(),
        retry_count: offer.retry_count,
        rnr_retry_count: offer.rnr_retry_count,
        srq: offer.srq.into(),
        qp_num: offer.qpn,
    }
}

impl HostLibrary {
    /// Loads librdmacm and opens a channel that does not wait.
    pub(super) fn open() -> Result<Self, LibraryError> {
        let functions = Functions::load()?;
        // SAFETY: no preconditions.
        let channel = unsafe { (functions.create_event_channel)() };
        if channel.is_null() {
            return Err(refused("open an event channel of the host's connection manager"));
        }
        let by_id = BTreeMap::new();
        let host = Self { functions, channel, ids: BTreeMap::new(), by_id, listeners: Vec::new() };
        // SAFETY: the descriptor is open as long as the channel, which lives as long as `host`.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(host.fd()) };
        let flags = rustix::fs::fcntl_getfl(fd);
        flags
            .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK))
            .map_err(|error| LibraryError::Refused("set up an event channel", error.into()))?;
        Ok(host)
    }

    /// Becomes readable with events.
    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: it was made by `open` and is never freed before this value is.
        unsafe { (*self.channel).fd }
    }

    fn create(&mut self) -> Result<*mut CmId, Refused> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel is open, and `id` a place for the result.
        done(unsafe {
            (self.functions.create_id)(self.channel, &mut id, ptr::null_mut(), PS_TCP)
        })?;
        Ok(id)
    }

    /// Takes connections at a port of all addresses of the host.
    pub(super) fn listen(&mut self, port: u16) -> Result<(), LibraryError> {
        let id = self.create().map_err(|Refused| refused("make an endpoint for rdma_cm"))?;
        self.listeners.push(id);
        let any = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0);
        let mut address = storage(&any.ip().octets(), port);
        let at: *mut libc::sockaddr_storage = &mut address;
        // SAFETY: `id` was made above, and the address is read during the call only.
        done(unsafe { (self.functions.bind_addr)(id, at.cast()) })
            .map_err(|Refused| refused("bind a port of rdma_cm"))?;
        // SAFETY: as above.
        done(unsafe { (self.functions.listen)(id, BACKLOG) })
            .map_err(|Refused| refused("listen on a port of rdma_cm"))
    }

    fn add(&mut self, key: Key, id: *mut CmId, ask: Option<Ask>) {
        self.by_id.insert(id.addr(), key);
        self.ids.insert(key, Id { id, ask });
    }

    fn id(&self, key: Key) -> Result<*mut CmId, Refused> {
        self.ids.get(&key).map(|id| id.id).ok_or(Refused)
    }

    /// The attributes that the host's connection manager would give a queue pair of its own.
    fn qp_attr(&self, id: *mut CmId, state: ibv_qp_state::Type) -> Result<ibv_qp_attr, Refused> {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = state;
        let mut mask = 0;
        // SAFETY: `id` is one of `ids`, or of the event that is being looked at.
        done(unsafe { (self.functions.init_qp_attr)(id, &mut attr, &mut mask) })?;
        Ok(attr)
    }

    /// What a peer said, in `conn` and in what it makes of queue pairs.
    fn answer(&self, id: *mut CmId, conn: &ConnParam) -> Result<Answer, Refused> {
        let receive = self.qp_attr(id, ibv_qp_state::IBV_QPS_RTR)?;
        let send = self.qp_attr(id, ibv_qp_state::IBV_QPS_RTS)?;
        Ok(Answer {
            offer: Offer {
                qpn: conn.qp_num,
                psn: send.sq_psn,
                // The kernel tells them from this side's point of view (cm.c, cm_format_req_event
                // and cm_format_rep_event).
                responder_resources: conn.initiator_depth,
                initiator_depth: conn.responder_resources,
                retry_count: conn.retry_count,
                rnr_retry_count: conn.rnr_retry_count,
                flow_control: conn.flow_control != 0,
                srq: conn.srq != 0,
                guid: [0; 8],
            },
            agreed: Agreed {
                psn: receive.rq_psn,
                mtu: u8::try_from(receive.path_mtu).unwrap_or(0),
            },
            private: private(conn),
        })
    }

    /// The next event, once it has been acknowledged. `new_key` is for a connection that a peer
    /// asks for.
    pub(super) fn next_event(&mut self, new_key: Key) -> Option<Event> {
        // Each of librdmacm's may be none of ours.
        loop {
            let mut raw = ptr::null_mut();
            // SAFETY: the channel is open, and `raw` a place for the result.
            if unsafe { (self.functions.get_cm_event)(self.channel, &mut raw) } != 0 {
                return None;
            }
            // SAFETY: librdmacm gave it, and it is there until it is acknowledged.
            let event = unsafe { raw.read() };
            let told = self.understand(&event, new_key);
            // SAFETY: as above; nobody looks at it any more.
            let acknowledged = unsafe { (self.functions.ack_cm_event)(raw) };
            if done(acknowledged).is_err() {
                tracing::warn!("an event of the host's connection manager stays");
            }
            if told.is_some() {
                return told;
            }
        }
    }

    fn understand(&mut self, event: &CmEvent, new_key: Key) -> Option<Event> {
        if event.event == kind::CONNECT_REQUEST {
            return self.requested(event, new_key);
        }
        let key = *self.by_id.get(&event.id.addr())?;
        match event.event {
            kind::ADDR_RESOLVED => {
                // SAFETY: the connection is one of `ids`.
                let asked = unsafe { (self.functions.resolve_route)(event.id, RESOLVE_MS) };
                done(asked).err().map(|Refused| Event::Failed(key))
            }
            kind::ROUTE_RESOLVED => {
                let ask = self.ids.get_mut(&key).and_then(|id| id.ask.take());
                let Some(Ask { offer, private, .. }) = ask else { return Some(Event::Failed(key)) };
                let mut param = param(&offer, &private, REQ_PRIVATE);
                // SAFETY: as above; the parameters and what they point to live through the call.
                let asked = unsafe { (self.functions.connect)(event.id, &mut param) };
                done(asked).err().map(|Refused| Event::Failed(key))
            }
            kind::CONNECT_RESPONSE => Some(match self.answer(event.id, &event.conn) {
                Ok(answer) => Event::Response(key, answer),
                Err(Refused) => Event::Failed(key),
            }),
            kind::ESTABLISHED => Some(Event::Established(key)),
            kind::REJECTED => {
                let reason = u16::try_from(event.status)
                    .unwrap_or(vhost_rdma_engine::cm::message::reason::CONSUMER);
                Some(Event::Rejected { key, reason, private: private(&event.conn) })
            }
            kind::DISCONNECTED | kind::DEVICE_REMOVAL => Some(Event::Disconnected(key)),
            kind::ADDR_ERROR | kind::ROUTE_ERROR | kind::CONNECT_ERROR | kind::UNREACHABLE => {
                tracing::debug!(event = event.event, status = event.status, "no connection");
                Some(Event::Failed(key))
            }
            _ => None,
        }
    }

    fn requested(&mut self, event: &CmEvent, key: Key) -> Option<Event> {
        // Known from here on, so that whatever comes of it is ended like any other.
        self.add(key, event.id, None);
        // SAFETY: librdmacm made it for this event.
        let CmId { src, dst, .. } = unsafe { event.id.read() };
        let told = end_of(&src).zip(end_of(&dst)).and_then(|(own, peer)| {
            let answer = self.answer(event.id, &event.conn).ok()?;
            let ends = Ends { source: peer.0, source_port: peer.1, dest: own.0, dest_port: own.1 };
            Some(Event::Request { key, ends, answer })
        });
        // Who cannot be understood is not answered: the connection cannot be ended before its event
        // is acknowledged.
        told.or(Some(Event::Failed(key)))
    }
}

fn private(conn: &ConnParam) -> Vec<u8> {
    if conn.private_data.is_null() {
        return Vec::new();
    }
    let len = usize::from(conn.private_data_len);
    // SAFETY: librdmacm's own copy of what the peer sent, of that length, until the event is
    // acknowledged.
    unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len) }.to_vec()
}

impl HostCm for HostLibrary {
    fn connect(&mut self, key: Key, ask: &Ask) -> Result<(), Refused> {
        let id = self.create()?;
        self.add(key, id, Some(ask.clone()));
        let (mut from, mut to) = (storage(&ask.from, 0), storage(&ask.to, ask.port));
        let source: *mut libc::sockaddr_storage = &mut from;
        let target: *mut libc::sockaddr_storage = &mut to;
        // SAFETY: `id` was made above, and the addresses are read during the call only.
        let asked =
            unsafe { (self.functions.resolve_addr)(id, source.cast(), target.cast(), RESOLVE_MS) };
        done(asked).inspect_err(|Refused| self.close(key))
    }

    fn establish(&mut self, key: Key) -> Result<(), Refused> {
        let id = self.id(key)?;
        // SAFETY: the connection is one of `ids`.
        done(unsafe { (self.functions.establish)(id) })
    }

    fn accept(&mut self, key: Key, offer: &Offer, private: &[u8]) -> Result<(), Refused> {
        let id = self.id(key)?;
        let mut param = param(offer, private, REP_PRIVATE);
        // SAFETY: as above; the parameters and what they point to live through the call.
        done(unsafe { (self.functions.accept)(id, &mut param) })
    }

    fn reject(&mut self, key: Key, private: &[u8]) {
        let Ok(id) = self.id(key) else { return };
        let len = u8::try_from(private.len().min(REJ_PRIVATE)).unwrap_or(0);
        // SAFETY: as above. Who cannot be told finds out by waiting.
        let _ = done(unsafe { (self.functions.reject)(id, private.as_ptr().cast(), len) });
    }

    fn disconnect(&mut self, key: Key) {
        let Ok(id) = self.id(key) else { return };
        // SAFETY: as above. It may be over already.
        let _ = done(unsafe { (self.functions.disconnect)(id) });
    }

    fn close(&mut self, key: Key) {
        let Some(Id { id, .. }) = self.ids.remove(&key) else { return };
        self.by_id.remove(&id.addr());
        // SAFETY: it was made by librdmacm, is destroyed once, and none of its events waits for
        // acknowledgement.
        if done(unsafe { (self.functions.destroy_id)(id) }).is_err() {
            tracing::warn!("a connection of the host's connection manager stays");
        }
    }
}

impl Drop for HostLibrary {
    fn drop(&mut self) {
        let keys: Vec<Key> = self.ids.keys().copied().collect();
        keys.into_iter().for_each(|key| self.close(key));
        for id in self.listeners.drain(..) {
            // SAFETY: made by `listen`, destroyed once.
            let _ = done(unsafe { (self.functions.destroy_id)(id) });
        }
        // The channel goes with the process: there is one.
    }
}

impl std::fmt::Debug for HostLibrary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostLibrary").field("connections", &self.ids.len()).finish_non_exhaustive()
    }
}
