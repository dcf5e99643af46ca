//! Taps: an interface whose other end is a file. Rtnetlink cannot make them; `/dev/net/tun` does.
//!
//! A persistent tap belongs to a user, who may open it later without any capability: that is how a
//! VMM that runs as nobody gets its network.

use std::fs::File;
use std::os::fd::AsFd;

use rustix::ioctl::{IntegerSetter, Opcode, Setter, ioctl};

use super::client::check_name;
use crate::{Error, Netns, Result};

/// A tap to make.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tap<'a> {
    /// Its name.
    pub name: &'a str,
    /// Where it is made; `None` for the calling thread's namespace.
    pub netns: Option<&'a Netns>,
    /// The user who may open it besides root.
    pub owner: Option<u32>,
    /// The group whose members may open it.
    pub group: Option<u32>,
    /// Several queues: must then be opened so by the VMM as well.
    pub multi_queue: bool,
}

/// `linux/if_tun.h`: `_IOW('T', n, int)`, though the first takes a `struct ifreq`.
const fn code(number: u8) -> Opcode {
    rustix::ioctl::opcode::write::<i32>(b'T', number)
}

const TUNSETIFF: Opcode = code(202);
const TUNSETPERSIST: Opcode = code(203);
const TUNSETOWNER: Opcode = code(204);
const TUNSETGROUP: Opcode = code(206);
const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
/// Fails instead of attaching to one that is there.
const IFF_TUN_EXCL: u16 = 0x8000;

/// The part of `struct ifreq` that `TUNSETIFF` reads.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

impl Tap<'_> {
    /// Makes the tap; it is down and stays until it is removed.
    ///
    /// # Errors
    /// [`Error::errno`] is `EBUSY` if the name is taken; `/dev/net/tun` is missing or closed to us
    /// (`CAP_NET_ADMIN`).
    pub fn create(&self) -> Result<()> {
        check_name(self.name)?;
        match self.netns {
            Some(netns) => netns.run(|| self.create_here()),
            None => self.create_here(),
        }
    }

    fn create_here(&self) -> Result<()> {
        let what = format!("make the tap {}", self.name);
        let queues = if self.multi_queue { IFF_MULTI_QUEUE } else { 0 };
        let file =
            attach(self.name, IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | IFF_TUN_EXCL | queues, &what)?;
        if let Some(owner) = self.owner {
            set::<TUNSETOWNER>(&file, owner, &what)?;
        }
        if let Some(group) = self.group {
            set::<TUNSETGROUP>(&file, group, &what)?;
        }
        // Last: until here a failure leaves nothing behind.
        set::<TUNSETPERSIST>(&file, 1, &what)
    }
}

/// Removes a tap of the calling thread's namespace, as [`Links::delete`](super::Links::delete) does
/// by index.
///
/// # Errors
/// It is in use, or of another kind.
pub fn remove_tap(name: &str) -> Result<()> {
    check_name(name)?;
    let mut links = super::Links::open()?;
    let link = links.by_name(name)?;
    if link.driver_kind.as_deref() != Some("tun") {
        return Err(Error::Invalid(format!("network interface {name} is no tap")));
    }
    links.delete(link.index)
}

fn attach(name: &str, flags: u16, what: &str) -> Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(|source| Error::io(format!("{what}: open /dev/net/tun"), source))?;
    let mut request = Request { name: [0; 16], flags, rest: [0; 22] };
    for (to, from) in request.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: TUNSETIFF reads and writes a `struct ifreq` of 40 bytes, which `Request` is.
    let set = unsafe { Setter::<TUNSETIFF, Request>::new(request) };
    // SAFETY: as above; the kernel keeps no reference.
    unsafe { ioctl(file.as_fd(), set) }.map_err(|errno| Error::io(what, errno))?;
    Ok(file)
}

fn set<const CODE: Opcode>(file: &File, value: u32, what: &str) -> Result<()> {
    let value =
        usize::try_from(value).map_err(|_| Error::Invalid(format!("{value} is too large")))?;
    // SAFETY: these requests take a plain number in the place of a pointer.
    let set = unsafe { IntegerSetter::<CODE>::new_usize(value) };
    // SAFETY: as above.
    unsafe { ioctl(file.as_fd(), set) }.map_err(|errno| Error::io(what, errno))
}
