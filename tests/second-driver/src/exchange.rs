//! How two `ibv_rc_pingpong` tell each other their addresses: over TCP, in text.
//!
//! From `libibverbs/examples/rc_pingpong.c` of rdma-core. The client sends its address in 52 bytes,
//! the last of them zero; the server connects its queue pair, then answers with its own; the client
//! says "done". The peer is not trusted: it has 52 bytes, and they must be an address.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Error, Result};

/// "0000:000000:000000:" and a GID of 32 digits, with the terminating zero.
const LENGTH: usize = 52;
pub(crate) const DONE: &[u8; 5] = b"done\0";
/// How long a read lasts before the device is thought of.
const SLICE: Duration = Duration::from_millis(100);

/// Where a queue pair is reached: its number, its first PSN, its GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) gid: Ipv6Addr,
}

impl Address {
    /// As it is sent. An Ethernet port has no LID.
    pub(crate) fn to_wire(self) -> Vec<u8> {
        let gid = u128::from(self.gid);
        format!("0000:{:06x}:{:06x}:{gid:032x}\0", self.qpn, self.psn).into_bytes()
    }

    fn from_wire(wire: [u8; LENGTH]) -> Result<Self> {
        let text =
            String::from_utf8_lossy(wire.split(|byte| *byte == 0).next().unwrap_or_default());
        let fields: Vec<_> = text.split(':').map(|field| u128::from_str_radix(field, 16)).collect();
        match fields[..] {
            [Ok(_), Ok(qpn @ 0..0x100_0000), Ok(psn @ 0..0x100_0000), Ok(gid @ 1..)] => {
                let number = |field| u32::try_from(field).unwrap_or_default();
                Ok(Self { qpn: number(qpn), psn: number(psn), gid: Ipv6Addr::from(gid) })
            }
            [_, _, _, Ok(0)] => Err(Error::Peer("it sent no GID; it needs -g INDEX".to_owned())),
            _ => Err(Error::Peer(format!("no address of a pingpong: {text:?}"))),
        }
    }
}

/// A connection to the other pingpong.
pub(crate) struct Peer {
    stream: TcpStream,
    timeout: Duration,
}

impl Peer {
    pub(crate) fn connect(host: &str, timeout: Duration) -> Result<Self> {
        let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
        for address in host.to_socket_addrs().map_err(Error::host("the server's name"))? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) => return Self::new(stream, timeout),
                Err(error) => last = error,
            }
        }
        Err(Error::host("a connection to the server")(last))
    }

    /// Accepts one client.
    pub(crate) fn accept(listener: &TcpListener, timeout: Duration) -> Result<Self> {
        let limit = Timespec::try_from(timeout).map_err(|_| Error::Timeout("end of a wait"))?;
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(Error::Timeout("client")),
            Ok(_) => {}
            Err(error) => return Err(Error::host("a wait for a client")(error)),
        }
        let (stream, _) = listener.accept().map_err(Error::host("a client"))?;
        Self::new(stream, timeout)
    }

    fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        stream.set_read_timeout(Some(SLICE)).map_err(Error::host("the connection"))?;
        stream.set_write_timeout(Some(timeout)).map_err(Error::host("the connection"))?;
        Ok(Self { stream, timeout })
    }

    pub(crate) fn address(&mut self, idle: impl FnMut() -> Result<()>) -> Result<Address> {
        Address::from_wire(self.receive(idle)?)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(Error::host("the connection"))
    }

    pub(crate) fn done(&mut self, idle: impl FnMut() -> Result<()>) -> Result<()> {
        let right = self.receive(idle)? == *DONE;
        right.then_some(()).ok_or_else(|| Error::Peer("it is not done".to_owned()))
    }

    fn receive<const N: usize>(&mut self, mut idle: impl FnMut() -> Result<()>) -> Result<[u8; N]> {
        let (mut bytes, mut done, begin) = ([0; N], 0, Instant::now());
        while done < N {
            match self.stream.read(&mut bytes[done..]) {
                Ok(0) => return Err(Error::Peer("it closed the connection".to_owned())),
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => idle()?,
                Err(error) => return Err(Error::host("the connection")(error)),
            }
            if begin.elapsed() > self.timeout {
                return Err(Error::Timeout("word of the peer"));
            }
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_rdma_core_writes_it_and_nothing_else_is_one() {
        let gid = "::ffff:10.0.0.7".parse().unwrap();
        let address = Address { qpn: 0x2f, psn: 0x00ab_cdef, gid };
        let good = *b"0000:00002f:abcdef:00000000000000000000ffff0a000007\0";
        assert_eq!(address.to_wire(), good);
        assert_eq!(Address::from_wire(good).unwrap(), address);
        for (at, byte) in [(7, b'x'), (4, b'0'), (18, 0), (12, 0xff), (11, b'0')] {
            let mut wire = good;
            wire[at] = byte;
            assert!(Address::from_wire(wire).is_err(), "{}", wire.escape_ascii());
        }
    }
}
