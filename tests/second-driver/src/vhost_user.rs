//! The monitor's end of a vhost-user socket, from QEMU's `docs/interop/vhost-user.rst`.
//!
//! Only the messages that this device needs (2.4). Written here, since the public frontend waits
//! without a bound. A reply is taken only if it is the one that is due, in its length.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::error::{Error, Result};
use crate::layout::Record;
use crate::memory::{BASE, Memory};
use crate::virtqueue::Virtqueue;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// `VIRTIO_F_VERSION_1`, and vhost-user's own bit, which the guest does not see.
const FEATURES: u64 = 1 << 32 | 1 << 30;
/// MQ, REPLY_ACK and CONFIG.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 9;

pub(crate) struct Connection(UnixStream);

impl Connection {
    /// Connects, and settles the features. No answer takes longer than `timeout`.
    pub(crate) fn open(path: &Path, timeout: Duration) -> Result<Self> {
        let socket = UnixStream::connect(path).map_err(Error::host("the NIC's socket"))?;
        socket.set_read_timeout(Some(timeout)).map_err(Error::host("the NIC's socket"))?;
        socket.set_write_timeout(Some(timeout)).map_err(Error::host("the NIC's socket"))?;
        let this = Self(socket);
        let features = this.get(GET_FEATURES)?;
        this.send(SET_OWNER, 0, &[], &[])?;
        let protocol = this.get(GET_PROTOCOL_FEATURES)?;
        if features & FEATURES != FEATURES || protocol & PROTOCOL_FEATURES != PROTOCOL_FEATURES {
            let offered = format!("it offers features {features:#x}, {protocol:#x}");
            return Err(Error::Device(offered));
        }
        this.send(SET_PROTOCOL_FEATURES, 0, &PROTOCOL_FEATURES.to_le_bytes(), &[])?;
        this.set(SET_FEATURES, &FEATURES.to_le_bytes(), &[])?;
        Ok(this)
    }

    /// How many virtqueues there are at most.
    pub(crate) fn queues(&self) -> Result<u64> {
        self.get(GET_QUEUE_NUM)
    }

    /// The configuration space, in one message (DRV-CFG-1).
    pub(crate) fn config(&self) -> Result<Record<64>> {
        self.send(GET_CONFIG, 0, &Record::<76>::ZERO.u32(4, 64).0, &[])?;
        Ok(Record(Record::<76>(self.reply(GET_CONFIG)?).get(12)))
    }

    pub(crate) fn set_memory(&self, memory: &Memory) -> Result<()> {
        let table = Record::<40>::ZERO.u32(0, 1).u64(8, BASE).u64(16, memory.size);
        let table = table.u64(24, memory.host_address(BASE)?);
        self.set(SET_MEM_TABLE, &table.0, &[memory.file()])
    }

    /// Starts a virtqueue whose interrupt is `line`.
    pub(crate) fn start(
        &self,
        queue: &Virtqueue,
        memory: &Memory,
        line: BorrowedFd<'_>,
    ) -> Result<()> {
        let index = u32::from(queue.index);
        let state = |value: u32| Record::<8>::ZERO.u32(0, index).u32(4, value).0;
        self.set(SET_VRING_NUM, &state(u32::from(queue.size)), &[])?;
        self.set(SET_VRING_BASE, &state(0), &[])?;
        let [desc, avail, used] = queue.addresses().map(|addr| memory.host_address(addr));
        let addresses = Record::<40>::ZERO.u32(0, index).u64(8, desc?).u64(16, used?);
        self.set(SET_VRING_ADDR, &addresses.u64(24, avail?).0, &[])?;
        self.set(SET_VRING_CALL, &state(0), &[line])?;
        self.set(SET_VRING_KICK, &state(0), &[queue.kick_fd()])?;
        self.set(SET_VRING_ENABLE, &state(1), &[])
    }

    /// Stops a virtqueue: when this returns, the device has let go of it.
    pub(crate) fn stop(&self, queue: &Virtqueue) -> Result<()> {
        let state = Record::<8>::ZERO.u32(0, u32::from(queue.index));
        self.send(GET_VRING_BASE, 0, &state.0, &[])?;
        self.reply::<8>(GET_VRING_BASE).map(drop)
    }

    fn get(&self, request: u32) -> Result<u64> {
        self.send(request, 0, &[], &[])?;
        Ok(u64::from_le_bytes(self.reply(request)?))
    }

    /// Sends a message and waits until it is carried out (REPLY_ACK).
    fn set(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, NEED_REPLY, payload, fds)?;
        match u64::from_le_bytes(self.reply(request)?) {
            0 => Ok(()),
            code => Err(Error::Device(format!("vhost-user message {request}: {code}"))),
        }
    }

    fn send(&self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = Record::<12>::ZERO.u32(0, code).u32(4, VERSION | flags).u32(8, size);
        let message = [&header.0, payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let fits = fds.is_empty() || rights.push(SendAncillaryMessage::ScmRights(fds));
        let sent = sendmsg(&self.0, &[IoSlice::new(&message)], &mut rights, SendFlags::NOSIGNAL)
            .map_err(Error::host("the NIC's socket"))?;
        // Messages are far smaller than the buffer of a socket that is read one by one.
        if fits && sent == message.len() { Ok(()) } else { Err(Error::Timeout("room to send")) }
    }

    fn reply<const N: usize>(&self, request: u32) -> Result<[u8; N]> {
        let (mut header, mut payload) = (Record::<12>::ZERO, [0; N]);
        let mut socket = &self.0;
        socket.read_exact(&mut header.0).map_err(Error::host("an answer of the NIC's socket"))?;
        let flags = header.get32(4) & !NEED_REPLY;
        let right = (header.get32(0), flags, header.get32(8) as usize);
        if right != (request, VERSION | REPLY, N) {
            return Err(Error::Device(format!("vhost-user message {request} answered wrongly")));
        }
        socket.read_exact(&mut payload).map_err(Error::host("an answer of the NIC's socket"))?;
        Ok(payload)
    }
}
