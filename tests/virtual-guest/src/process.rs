//! A process's side of its NIC's socket (docs/virtio-rdma-process.md): messages in packets, with
//! descriptors. Every one can be malformed on purpose.

use std::collections::{BTreeMap, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect,
    recvmsg, sendmsg, shutdown, socket_with,
};
use vmm_sys_util::eventfd::EventFd;

use crate::guest::{Error, Result};
use crate::ram::{View, eventfd_of, lock};
use crate::spec::{PAGE, Put, Take, err};

/// What a request asks for (section 3).
#[allow(missing_docs)]
pub mod op {
    pub const HELLO: u32 = 1;
    pub const MEMORY_ADD: u32 = 2;
    pub const MEMORY_REMOVE: u32 = 3;
    pub const CHANNEL_ADD: u32 = 4;
    pub const CHANNEL_REMOVE: u32 = 5;
    pub const ADDRESS: u32 = 6;
    pub const COMMAND: u32 = 7;
    pub const MIRROR_ADD: u32 = 8;
    pub const CM_ADD: u32 = 16;
    pub const CM_REMOVE: u32 = 17;
    pub const CM_COMMAND: u32 = 18;
}

/// Where names begin that no test has given.
const UNNAMED: u64 = 1 << 63;

/// What an answer is.
pub type Answer = (u32, Vec<u8>, Vec<OwnedFd>);

/// A connection.
#[derive(Debug)]
pub struct Process {
    socket: OwnedFd,
    /// Where asynchronous events come.
    events: OwnedFd,
    /// What objects that are made are called, and their channel.
    given: Mutex<(u64, u32)>,
    /// Objects that a test did not name, by the names that they have.
    made: Mutex<BTreeMap<u64, u32>>,
}

/// The answer to HELLO.
#[derive(Debug)]
pub struct Welcome {
    /// The status page, to be read.
    pub status: View,
    /// By which the device is kicked.
    pub kick: EventFd,
    /// What `ALIVE` is.
    pub alive: u32,
    /// Completion vectors.
    pub comp_vectors: usize,
    /// Entries of the table of addresses.
    pub addresses: u16,
    /// The NIC's MAC address.
    pub mac: [u8; 6],
}

/// A completion channel.
#[derive(Debug)]
pub struct Channel {
    /// Its number.
    pub number: u32,
    events: OwnedFd,
}

/// The channel of jobs for mirrored regions.
#[derive(Debug)]
pub struct Mirrors {
    channel: OwnedFd,
    /// Jobs of the last packet that nobody has asked for yet.
    came: Mutex<VecDeque<Job>>,
}

/// What the owner of a mirrored region is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Job {
    pub number: u64,
    pub kind: u32,
    pub key: u32,
    pub address: u64,
    pub length: u32,
    pub operands: [u64; 2],
}

/// Kinds of jobs (section 4).
#[allow(missing_docs)]
pub mod job {
    pub const ARRIVED: u32 = 1;
    pub const WANTED: u32 = 2;
    pub const COMPARE_SWAP: u32 = 3;
    pub const FETCH_ADD: u32 = 4;
}

impl Mirrors {
    /// The next job, if one comes.
    pub fn job(&self, time: Duration) -> Option<Job> {
        let mut came = self.came.lock().expect("whole");
        if came.is_empty() {
            let channel = &self.channel;
            let (bytes, _) = wait(channel, time).then(|| receive(channel).ok())??;
            assert!(bytes.len().is_multiple_of(48) && bytes.len() <= 8 * 48, "{}", bytes.len());
            came.extend(bytes.chunks(48).map(|job| Job {
                number: job.u64_at(0),
                kind: job.u32_at(8),
                key: job.u32_at(12),
                address: job.u64_at(16),
                length: job.u32_at(24),
                operands: [job.u64_at(32), job.u64_at(40)],
            }));
        }
        came.pop_front()
    }

    /// Answers one.
    pub fn answer(&self, number: u64, status: u32, value: u64) -> std::io::Result<()> {
        let answer = Put::new().u64(number).u32(status).u32(0).u64(value).done(24);
        self.say(&answer)
    }

    /// Says anything.
    pub fn say(&self, bytes: &[u8]) -> std::io::Result<()> {
        send(&self.channel, bytes, &[])
    }
}

/// A channel of the connection manager.
#[derive(Debug)]
pub struct CmChannel {
    /// Its number.
    pub number: u32,
    tokens: OwnedFd,
}

/// Sends a packet with descriptors.
pub fn send(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)), "there is room");
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends a packet if there is room, and waits for nothing.
pub fn send_now(socket: BorrowedFd<'_>, bytes: &[u8]) -> std::io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(socket, bytes, flags)?;
    Ok(())
}

fn receive(socket: impl AsFd) -> std::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    bytes.truncate(got.bytes);
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok((bytes, files))
}

/// A socket that is connected to a NIC, where nothing was said yet.
pub fn knock(path: &Path) -> std::io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(20)))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Asks and waits for the answer.
pub fn ask(socket: impl AsFd, request: &[u8], files: &[BorrowedFd<'_>]) -> Result<Answer> {
    // Who is turned away is told so before it has said anything, and then nobody listens.
    match send(&socket, request, files) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        // What was said and not read is told first, and then what there is.
        _ => match ask_none(&socket) {
            Err(Error::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                ask_none(socket)
            }
            answer => answer,
        },
    }
}

/// Waits for an answer to nothing.
pub fn ask_none(socket: impl AsFd) -> Result<Answer> {
    let (bytes, files) = receive(&socket)?;
    if bytes.len() < 8 {
        return Err(Error::Disconnected);
    }
    Ok((bytes.u32_at(0), bytes[8..].to_vec(), files))
}

/// A request: its head and body.
pub fn request(op: u32, body: &[u8]) -> Vec<u8> {
    Put::new().u32(op).u32(0).bytes(body).done(8 + body.len())
}

/// A piece of memory as MEMORY_ADD and MEMORY_REMOVE name it: address, length, offset.
pub fn piece((address, length, offset): (u64, u64, u64)) -> Vec<u8> {
    Put::new().u64(address).u64(length).u64(offset).done(24)
}

fn ok(op: u32, (status, body, files): Answer) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    match status {
        err::OK => Ok((body, files)),
        status => Err(Error::Status { opcode: 0x1000 + op as u16, status }),
    }
}

/// Whether something is to be read there, now or soon.
fn wait(fd: &OwnedFd, time: Duration) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let time = Timespec::try_from(time).expect("a time");
    poll(&mut fds, Some(&time)).is_ok_and(|ready| ready == 1)
}

impl Process {
    /// Connects and says HELLO.
    pub fn connect(path: &Path) -> Result<(Self, Welcome)> {
        Self::hello(knock(path)?)
    }

    /// Says HELLO.
    pub fn hello(socket: OwnedFd) -> Result<(Self, Welcome)> {
        let body = Put::new().u32(1).u32(0).done(8);
        let (body, files) = ok(op::HELLO, ask(&socket, &request(op::HELLO, &body), &[])?)?;
        let [status, kick, events, put]: [OwnedFd; 4] =
            files.try_into().map_err(|files| Error::Broken(format!("{files:?}")))?;
        drop(put);
        let welcome = Welcome {
            status: View::of_file(status, PAGE)?,
            kick: eventfd_of(kick),
            alive: body.u32_at(4),
            comp_vectors: body.u32_at(8) as usize,
            addresses: body.u16_at(12),
            mac: body[14..20].try_into().expect("six bytes"),
        };
        let (given, made) = (Mutex::default(), Mutex::default());
        Ok((Self { socket, events, given, made }, welcome))
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Asks for something.
    pub fn ask(&self, op: u32, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<Answer> {
        ask(&self.socket, &request(op, body), files)
    }

    /// MEMORY_ADD.
    pub fn add_memory(&self, at: (u64, u64, u64), file: BorrowedFd<'_>) -> Result<()> {
        ok(op::MEMORY_ADD, self.ask(op::MEMORY_ADD, &piece(at), &[file])?).map(drop)
    }

    /// MEMORY_REMOVE.
    pub fn remove_memory(&self, address: u64, length: u64) -> Result<()> {
        let body = piece((address, length, 0));
        ok(op::MEMORY_REMOVE, self.ask(op::MEMORY_REMOVE, &body, &[])?).map(drop)
    }

    /// COMMAND, with a cookie and a channel; the status, and the response's body.
    pub fn command(&self, (cookie, channel): (u64, u32), command: &[u8]) -> Result<(u32, Vec<u8>)> {
        let given = Put::new().u64(cookie).u32(channel).u32(0).done(16);
        let (status, body, _) = self.ask(op::COMMAND, &[&given, command].concat(), &[])?;
        Ok((status, body))
    }

    /// Makes something that has this cookie and channel.
    pub fn with<T>(&self, given: (u64, u32), make: impl FnOnce() -> T) -> T {
        *lock(&self.given) = given;
        let made = make();
        *lock(&self.given) = (0, 0);
        made
    }

    /// What is made now has this cookie and channel.
    pub(crate) fn given(&self) -> (u64, u32) {
        static NEXT: AtomicU64 = AtomicU64::new(UNNAMED);
        match *lock(&self.given) {
            (0, channel) => (NEXT.fetch_add(1, Ordering::Relaxed), channel),
            given => given,
        }
    }

    /// An object of this name has this number.
    pub(crate) fn made(&self, name: u64, number: u32) {
        if name >= UNNAMED {
            lock(&self.made).insert(name, number);
        }
    }

    /// The number of an object that no test has named.
    pub(crate) fn number_of(&self, name: u64) -> Option<u32> {
        lock(&self.made).get(&name).copied()
    }

    /// CHANNEL_ADD.
    pub fn channel(&self) -> Result<Channel> {
        let (body, files) = ok(op::CHANNEL_ADD, self.ask(op::CHANNEL_ADD, &[], &[])?)?;
        let [events, put]: [OwnedFd; 2] =
            files.try_into().map_err(|files| Error::Broken(format!("{files:?}")))?;
        drop(put);
        Ok(Channel { number: body.u32_at(0), events })
    }

    /// MIRROR_ADD.
    pub fn mirrors(&self) -> Result<Mirrors> {
        let (_, files) = ok(op::MIRROR_ADD, self.ask(op::MIRROR_ADD, &[], &[])?)?;
        let [channel]: [OwnedFd; 1] =
            files.try_into().map_err(|files| Error::Broken(format!("{files:?}")))?;
        Ok(Mirrors { channel, came: Mutex::default() })
    }

    /// CHANNEL_REMOVE; its status.
    pub fn end_channel(&self, number: u32) -> Result<u32> {
        let body = Put::new().u32(number).u32(0).done(8);
        Ok(self.ask(op::CHANNEL_REMOVE, &body, &[])?.0)
    }

    /// CM_ADD.
    pub fn cm_channel(&self) -> Result<CmChannel> {
        let (body, files) = ok(op::CM_ADD, self.ask(op::CM_ADD, &[], &[])?)?;
        let [tokens]: [OwnedFd; 1] =
            files.try_into().map_err(|files| Error::Broken(format!("{files:?}")))?;
        Ok(CmChannel { number: body.u32_at(0), tokens })
    }

    /// CM_REMOVE; its status.
    pub fn end_cm(&self, channel: u32) -> Result<u32> {
        let body = Put::new().u32(channel).u32(0).done(8);
        Ok(self.ask(op::CM_REMOVE, &body, &[])?.0)
    }

    /// CM_COMMAND, of this number; the status, and the response.
    pub fn cm(&self, channel: u32, number: u32, body: &[u8]) -> Result<(u32, Vec<u8>)> {
        let head = Put::new().u32(channel).u32(0).u32(number).u32(0).done(16);
        let (status, body, _) = self.ask(op::CM_COMMAND, &[&head, body].concat(), &[])?;
        Ok((status, body))
    }

    /// ADDRESS.
    pub fn address(&self, index: u32) -> Result<[u8; 16]> {
        let body = Put::new().u32(index).u32(0).done(8);
        let (gid, _) = ok(op::ADDRESS, self.ask(op::ADDRESS, &body, &[])?)?;
        gid.try_into().map_err(|gid| Error::Broken(format!("{gid:?}")))
    }

    /// The next asynchronous event, if one comes: element and kind.
    pub fn event(&self, time: Duration) -> Option<(u64, u32)> {
        let (bytes, _) = wait(&self.events, time).then(|| receive(&self.events).ok())??;
        (bytes.len() == 16).then(|| (bytes.u64_at(0), bytes.u32_at(8)))
    }

    /// The number of the descriptor, for whom it is left to.
    pub fn raw(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// Ends the connection, whoever else has the socket.
    pub fn hang_up(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl CmChannel {
    /// Takes a token, if one comes.
    pub fn token(&self, time: Duration) -> bool {
        wait(&self.tokens, time) && receive(&self.tokens).is_ok_and(|(bytes, _)| bytes.len() == 8)
    }
}

impl Channel {
    /// The next completion event, if one comes: the CQ's cookie.
    pub fn event(&self, time: Duration) -> Option<u64> {
        let (bytes, _) = wait(&self.events, time).then(|| receive(&self.events).ok())??;
        (bytes.len() == 8).then(|| bytes.u64_at(0))
    }
}
