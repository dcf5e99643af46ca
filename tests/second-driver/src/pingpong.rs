//! `ibv_rc_pingpong`, to a second driver or to the real one in a Linux guest.
//!
//! The client sends, the server answers each message with one, strictly in turn. The real program
//! receives into the buffer that it sends from. So it echoes: as a server it returns each message,
//! as a client it sends 0x7b bytes first and then what it was answered. This one never echoes but
//! writes a fresh message each time, so every byte that comes back was carried for this turn. It
//! takes either from its peer, and holds it to what it was until then.
//!
//! The first byte of each page of a message is 0: the real server looks for that with `-c`.

use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Parser, value_parser};

use crate::device::{Device, random};
use crate::error::{Error, Result};
use crate::exchange::{Address, DONE, Peer};
use crate::layout::PAGE;
use crate::session::{Done, Session, region_bytes};

/// The real program fills its buffer with this.
const REAL_FILL: u8 = 0x7b;
/// What stands where nothing has arrived.
const BLOT: u8 = 0xee;

/// ibv_rc_pingpong over a NIC of vhost-rdma, without a virtual machine.
#[derive(Debug, Parser)]
#[command(group(ArgGroup::new("side").required(true)))]
pub struct Options {
    /// The NIC's vhost-user socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Be the client of a server at HOST:PORT (ibv_rc_pingpong's port is 18515).
    #[arg(long, value_name = "HOST:PORT", group = "side")]
    connect: Option<String>,
    /// Be a server on PORT; 0 takes a free one, which is printed.
    #[arg(long, value_name = "PORT", group = "side")]
    listen: Option<u16>,
    /// Entry of the GID table that the address is put into, and used from.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gid_index: u16,
    /// The NIC's IP address; by default the link-local address of its MAC address.
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Bytes in a message.
    #[arg(long, default_value_t = 4096, value_parser = value_parser!(u32).range(1..))]
    size: u32,
    /// Messages in each direction.
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u64).range(1..))]
    iters: u64,
    /// Check every byte that is received.
    #[arg(long)]
    verify: bool,
    /// The bound of every wait in seconds; commands of the device have 5 at least.
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u64).range(1..=86400))]
    timeout: u64,
}

/// Does the whole and says how it went: true only if all was sent, received, right, and given back.
pub fn run(options: &Options) -> bool {
    let mut talk = Talk::new(options);
    let done = talk.run();
    let (sent, received, each) = (talk.sent, talk.received, talk.time / talk.iters());
    println!(
        "{sent} of {} messages sent, {received} received, {} bytes each, {}, {each:?} each, {} \
         sleeps",
        options.iters,
        options.size,
        if options.verify && done.is_ok() { "data right" } else { "data not verified" },
        talk.sleeps,
    );
    if let Err(error) = &done {
        eprintln!("second-driver: {error}");
    }
    done.is_ok() && (sent, received) == (options.iters, options.iters)
}

struct Talk<'a> {
    options: &'a Options,
    client: bool,
    timeout: Duration,
    sent: u64,
    received: u64,
    sleeps: u32,
    time: Duration,
    arrived: Vec<u8>,
    peer: Sender,
}

impl<'a> Talk<'a> {
    fn new(options: &'a Options) -> Self {
        let (client, timeout) = (options.connect.is_some(), Duration::from_secs(options.timeout));
        let (arrived, peer) =
            (vec![BLOT; options.size as usize], Sender { echoes: true, writes: true });
        let time = Duration::ZERO;
        Self { options, client, timeout, sent: 0, received: 0, sleeps: 0, time, arrived, peer }
    }

    fn iters(&self) -> u32 {
        u32::try_from(self.received.max(1)).unwrap_or(u32::MAX)
    }

    /// Probe, connect, exchange, and the end in the order that the text demands.
    fn run(&mut self) -> Result<()> {
        let mut peer = self.reach()?;
        let buffers = region_bytes(self.options.size);
        let mut device = Device::start(&self.options.socket, buffers, self.timeout)?;
        let played = self.play(&mut device, &mut peer);
        // SHUTDOWN destroys what a failure left (5.3). One that fails too tells less than its
        // cause.
        let ended = device.shutdown();
        played.and(ended)
    }

    fn reach(&self) -> Result<Peer> {
        if let Some(host) = &self.options.connect {
            return Peer::connect(host, self.timeout);
        }
        let port = self.options.listen.unwrap_or_default();
        let listener =
            TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
        let listener = listener.map_err(Error::host("the port to listen on"))?;
        let address = listener.local_addr().map_err(Error::host("the port to listen on"))?;
        println!("listening on port {}", address.port());
        std::io::stdout().flush().map_err(Error::host("standard output"))?;
        Peer::accept(&listener, self.timeout)
    }

    fn play(&mut self, device: &mut Device, peer: &mut Peer) -> Result<()> {
        let gid = match self.options.address {
            Some(IpAddr::V4(address)) => address.to_ipv6_mapped(),
            Some(IpAddr::V6(address)) => address,
            None => link_local(device.mac),
        };
        device.set_gid(self.options.gid_index, gid.octets())?;
        let mut session = Session::open(device, self.options.size)?;
        session.blot(&self.arrived)?;
        self.meet(&mut session, peer, gid)?;
        let begin = Instant::now();
        let talked = self.talk(&mut session);
        (self.time, self.sleeps) = (begin.elapsed(), session.sleeps);
        talked?;
        session.close()
    }

    /// Exchanges addresses and connects the queue pair, in the order of `ibv_rc_pingpong`.
    fn meet(&self, session: &mut Session<'_>, peer: &mut Peer, gid: Ipv6Addr) -> Result<()> {
        let psn = u32::try_from(random()? & 0xff_ffff).unwrap_or_default();
        let own = Address { qpn: session.qpn, psn, gid };
        if self.client {
            peer.send(&own.to_wire())?;
        }
        let address = peer.address(|| session.device.keep_alive().map(drop))?;
        eprintln!("local {own:x?}, remote {address:x?}");
        if self.client {
            peer.send(DONE)?;
            return session.connect(psn, self.options.gid_index, &address);
        }
        session.connect(psn, self.options.gid_index, &address)?;
        peer.send(&own.to_wire())?;
        peer.done(|| session.device.keep_alive().map(drop))
    }

    fn talk(&mut self, session: &mut Session<'_>) -> Result<()> {
        let (iters, mut posted) = (self.options.iters, 0);
        let mut message = vec![0; self.arrived.len()];
        while self.sent < iters || self.received < iters {
            session.device.keep_alive()?;
            let due = if self.client { self.received == posted } else { self.received > posted };
            if due && posted == self.sent && posted < iters {
                fill(&mut message, self.client, posted);
                session.send(&message)?;
                posted += 1;
            }
            match session.next(Instant::now() + self.timeout)? {
                Done::Sent => self.sent += 1,
                Done::Received(length) if length == self.options.size => {
                    self.check(session)?;
                    self.received += 1;
                }
                Done::Received(length) => {
                    return Err(Error::Peer(format!("a message of {length} bytes")));
                }
            }
        }
        Ok(())
    }

    /// Looks at a message, and blots it out before the next one can come.
    fn check(&mut self, session: &Session<'_>) -> Result<()> {
        if !self.options.verify {
            return Ok(());
        }
        session.arrived(&mut self.arrived)?;
        self.peer.check(&self.arrived, self.client, self.received)?;
        self.arrived.fill(BLOT);
        session.blot(&self.arrived)
    }
}

/// What the peer may still be, after the messages that it sent.
struct Sender {
    echoes: bool,
    writes: bool,
}

impl Sender {
    /// Holds a message to what the peer may have sent in this turn.
    fn check(&mut self, arrived: &[u8], client: bool, turn: u64) -> Result<()> {
        let mut expected = vec![0; arrived.len()];
        fill(&mut expected, !client, turn);
        self.writes &= arrived == expected;
        if client || turn > 0 {
            fill(&mut expected, client, if client { turn } else { turn - 1 });
            self.echoes &= arrived == expected;
        } else {
            // With `-c` the real client begins pages with 0.
            expected.fill(REAL_FILL);
            let plain = arrived == expected;
            expected.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
            self.echoes &= plain || arrived == expected;
        }
        if self.echoes || self.writes {
            return Ok(());
        }
        let blots = arrived.iter().filter(|byte| **byte == BLOT).count();
        Err(Error::Peer(format!("message {turn} has wrong bytes; {blots} may never have come")))
    }
}

/// Writes the message of one side and turn.
fn fill(message: &mut [u8], client: bool, turn: u64) {
    let mut word = (turn << 1 | u64::from(client)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for byte in message.iter_mut() {
        // xorshift64 (Marsaglia 2003): two messages have no run of bytes in common.
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        *byte = word.to_le_bytes()[3];
    }
    message.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
}

/// The address that a Linux guest makes of a MAC address: modified EUI-64 (RFC 4291).
fn link_local([a, b, c, d, e, f]: [u8; 6]) -> Ipv6Addr {
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_stays_what_it_was_and_one_wrong_byte_is_seen() {
        let message = |client, turn| {
            let mut message = vec![0; 5000];
            fill(&mut message, client, turn);
            message
        };
        let any = || Sender { echoes: true, writes: true };
        let (mut server, mut real, mut second) = (any(), any(), any());
        server.check(&message(true, 0), true, 0).unwrap();
        server.check(&message(true, 1), true, 1).unwrap();
        assert!(server.check(&message(false, 2), true, 2).is_err(), "it echoed until now");
        real.check(&[REAL_FILL; 5000], false, 0).unwrap();
        real.check(&message(false, 0), false, 1).unwrap();
        assert!(real.check(&message(false, 0), false, 2).is_err(), "an old answer");
        second.check(&message(true, 0), false, 0).unwrap();
        assert!(second.check(&message(false, 0), false, 1).is_err(), "it wrote until now");
        let mut wrong = message(false, 7);
        wrong[4999] ^= 1;
        assert!(any().check(&wrong, true, 7).is_err());
        assert!(any().check(&[BLOT; 5000], false, 0).is_err(), "nothing arrived");
    }
}
