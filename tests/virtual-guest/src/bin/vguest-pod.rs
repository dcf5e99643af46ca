//! `vguest-pod`: the virtual guest as the program of a container, in the place of a virtual
//! machine.
//!
//! It connects to the vhost-user socket that the node agent mounted for it, as a VMM would,
//! connects again whenever the daemon comes back, starts a device that is lost again over the same
//! connection, as a driver does, and does RDMA with the same program in another pod when it is told
//! to. Requests are lines of JSON over TCP, answers likewise:
//!
//! - `{"do":"status"}`: number of the session and of the device's life in it (1 is the first), MAC,
//!   GID, QPN of the last queue pair
//! - `{"do":"transfer","peer":"10.1.2.3:7471","bytes":65536}`: bytes moved and verified by WRITE,
//!   READ and SEND both ways; with `--address` also a datagram of QP 1 each way, and how often it
//!   was sent
//! - `{"do":"peer",…}`, from another of its kind: the passive side of a transfer
//!
//! Queue pair numbers and addresses are exchanged over that TCP connection, so the pods' own
//! network is used as by real programs.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path as FsPath, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use virtual_guest::control::Mr;
use virtual_guest::daemon;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Av, Path, SendWr};
use virtual_guest::rings::Cqe;
use virtual_guest::spec::{GSI_QKEY, err, status};
use virtual_guest::world::{End, Node, pattern};

/// For something of the daemon or a peer, on a machine that is not emulated.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a daemon that is away is looked for.
const RETRY: Duration = Duration::from_millis(100);
/// After how long a connection manager says again what nobody answered, and how often it does.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u64 = 15;
/// A datagram of the connection manager, and what stands before it where it arrives.
const MAD: u32 = 256;
const GRH: u32 = 40;
/// A pod's memory limit is small.
const RAM: u64 = 16 << 20;

#[derive(Debug, Parser)]
#[command(about = "A virtual guest in a container: RDMA between pods without a VM")]
struct Args {
    /// The NIC's socket; without it, the file or directory that the agent's environment variables
    /// name
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Where requests come in
    #[arg(long, default_value = "0.0.0.0:7471")]
    listen: SocketAddr,
    /// The NIC's own address; without it, the link-local one of its MAC address, and QP 1 is not
    /// used
    #[arg(long)]
    address: Option<IpAddr>,
    /// Stay without a NIC when the daemon has ended the session, as QEMU does
    #[arg(long)]
    no_reconnect: bool,
    /// Memory in huge pages of 2 MiB
    #[arg(long)]
    huge_pages: bool,
    /// Give up, with an error, if no session comes about in this many seconds
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Request {
    Status,
    Transfer { peer: SocketAddr, bytes: u32 },
    Peer(Half),
    Check,
    Datagram,
    Bye,
}

/// What one side of a connection tells the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Half {
    gid: [u8; 16],
    qpn: u32,
    addr: u64,
    rkey: u32,
    bytes: u32,
    seed: u64,
}

/// One life of the connection to the daemon.
struct Session {
    node: Node,
    /// QP 1, of a guest with an address.
    cm: Option<Cm>,
    /// How often the device was started.
    lives: u32,
    /// Shares the connection, to see it end.
    watch: UnixStream,
}

impl Session {
    fn open(socket: &FsPath, args: &Args) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        let watch = stream.try_clone()?;
        let huge_pages = args.huge_pages;
        let config = GuestConfig { ram_bytes: RAM, huge_pages, ..Default::default() };
        let guest = Guest::attach(stream, config)?;
        let gid = match args.address {
            Some(IpAddr::V4(v4)) => v4.to_ipv6_mapped().octets(),
            Some(IpAddr::V6(v6)) => v6.octets(),
            None => link_local(guest.device().mac),
        };
        // The driver's steps panic where the device refuses them.
        let node = quietly(|| Node::start("pod".into(), socket.to_path_buf(), guest, gid))?;
        let cm = args.address.map(|_| Cm::new(&node)).transpose()?;
        Ok(Self { node, cm, lives: 1, watch })
    }

    /// Starts a device that is lost again: its process has died, and the connection lives on.
    fn mend(&mut self) -> Result<()> {
        let old = &self.node;
        let is_lost = old.guest.query_device().is_err_and(|e| e.status() == Some(err::FATAL));
        if is_lost {
            old.guest.reset()?;
            let (name, socket, guest) = (old.name.clone(), old.socket.clone(), old.guest.clone());
            self.node = quietly(|| Node::start(name, socket, guest, old.gid))?;
            self.cm = self.cm.take().map(|_| Cm::new(&self.node)).transpose()?;
            self.lives += 1;
            eprintln!("the device was lost; life {}", self.lives);
        }
        Ok(())
    }
}

/// The GID that every NIC may use: RFC 4291, appendix A.
fn link_local(mac: [u8; 6]) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// Runs `f`, whose panic becomes an error: one request that fails must not end the program.
fn quietly<T>(f: impl FnOnce() -> T) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|cause| {
        let text = cause
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        anyhow::anyhow!("{}", text.unwrap_or_else(|| "panic".into()))
    })
}

/// One side of a transfer: a connected queue pair, a region that the peer writes and reads, one
/// that receives.
struct Side {
    end: End,
    /// First half: what the peer writes. Second half: what it reads.
    shared: Mr,
    inbox: Mr,
    bytes: u32,
    seed: u64,
}

impl Side {
    fn new(node: &Node, bytes: u32, seed: u64) -> Result<Self> {
        ensure!((1..=1 << 20).contains(&bytes), "bytes must be 1 to 1 MiB");
        let mut side = quietly(|| {
            let (shared, inbox) = (node.mr(2 * u64::from(bytes)), node.mr(bytes.into()));
            shared.view().write(bytes.into(), &pattern(seed + 1, bytes as usize));
            Self { end: node.rc(), shared, inbox, bytes, seed }
        })?;
        // What is posted before INIT is lost.
        side.end.qp.to_init(&Path::default())?;
        side.end.qp.post_recv(1, &[side.inbox.sge(0, bytes)]);
        Ok(side)
    }

    fn half(&self) -> Half {
        let (gid, qpn) = self.end.address();
        let (bytes, seed) = (self.bytes, self.seed);
        Half { gid, qpn, addr: self.shared.addr(0), rkey: self.shared.rkey, bytes, seed }
    }

    fn connect(&self, peer: &Half) -> Result<()> {
        self.end.qp.to_rtr((peer.gid, peer.qpn), &Path::default()).context("INIT to RTR")?;
        Ok(self.end.qp.to_rts(&Path::default())?)
    }

    fn sent(&mut self, what: &str, request: &SendWr) -> Result<()> {
        self.end.qp.post_send(request);
        let cqe = self.end.scq.wait(patience());
        completed(what, cqe)
    }

    fn received(&mut self, seed: u64) -> Result<()> {
        let cqe = self.end.rcq.wait(patience());
        completed("RECV", cqe)?;
        self.same("what was received", &self.inbox, 0, seed)
    }

    fn same(&self, what: &str, mr: &Mr, at: u64, seed: u64) -> Result<()> {
        let (found, wanted) =
            (mr.view().vec(at, self.bytes.into()), pattern(seed, self.bytes as usize));
        let wrong = found.iter().zip(&wanted).position(|(a, b)| a != b);
        wrong.map_or(Ok(()), |at| bail!("{what} differs from what was sent at byte {at}"))
    }

    /// Sends the pattern of `seed` from a buffer of its own.
    fn send(&mut self, seed: u64) -> Result<()> {
        let from = self.end.node.clone();
        let mr = quietly(|| from.mr_with(&pattern(seed, self.bytes as usize)))?;
        self.sent("SEND", &SendWr::send(2, &[mr.sge(0, self.bytes)]))?;
        Ok(from.ctx.dereg(mr.lkey)?)
    }

    fn close(self) -> Result<()> {
        self.end.qp.destroy()?;
        self.end.scq.destroy()?;
        self.end.rcq.destroy()?;
        for mr in [&self.shared, &self.inbox] {
            self.end.node.ctx.dereg(mr.lkey)?;
        }
        Ok(())
    }
}

fn patience() -> Duration {
    PATIENCE * daemon::patience()
}

fn completed(what: &str, cqe: Option<Cqe>) -> Result<()> {
    match cqe {
        Some(cqe) if cqe.status == status::SUCCESS => Ok(()),
        Some(cqe) => bail!("{what} completed with status {}", cqe.status),
        None => bail!("{what} did not complete within {} s", patience().as_secs()),
    }
}

/// QP 1, and its one posted receive.
struct Cm {
    end: End,
    said: Mr,
    heard: Mr,
}

impl Cm {
    fn new(node: &Node) -> Result<Self> {
        let mut cm = quietly(|| {
            let end = node.gsi();
            let (said, heard) = (end.node.mr(MAD.into()), end.node.mr((GRH + MAD).into()));
            Self { end, said, heard }
        })?;
        cm.listen();
        Ok(cm)
    }

    fn listen(&mut self) {
        let sge = [self.heard.sge(0, GRH + MAD)];
        self.end.qp.post_recv(1, &sge);
    }

    fn say(&mut self, to: [u8; 16], seed: u64) -> Result<()> {
        let ah = self.end.node.ctx.create_ah(self.end.node.pdn, &Av::to(to))?;
        self.said.view().write(0, &pattern(seed, MAD as usize));
        let sge = [self.said.sge(0, MAD)];
        self.end.qp.post_send(&SendWr::datagram(2, &sge, ah, 1, GSI_QKEY));
        completed("a datagram of QP 1", self.end.scq.wait(patience()))?;
        Ok(self.end.node.ctx.destroy_ah(ah)?)
    }

    /// Whether a datagram of this sender with the pattern of `seed` came within `time`. What is
    /// left of earlier conversations is not for us.
    fn hear(&mut self, from: [u8; 16], seed: u64, time: Duration) -> Result<bool> {
        let Some(cqe) = self.end.rcq.wait(time) else { return Ok(false) };
        completed("the receive of QP 1", Some(cqe))?;
        let bytes = self.heard.view().vec(0, (GRH + MAD).into());
        self.listen();
        let (grh, data) = bytes.split_at_checked(GRH as usize).context("a short datagram")?;
        // The last 20 bytes of the header are IPv4's where the addresses are.
        let sender = if from.starts_with(&[0; 10]) { grh.get(32..36) } else { grh.get(8..24) };
        let known = from.get(if from.starts_with(&[0; 10]) { 12.. } else { 0.. });
        Ok(sender == known && data == pattern(seed, MAD as usize))
    }
}

/// The active side says something, again where nobody answers, as connection managers do; how often
/// it did.
fn call(cm: &mut Cm, to: [u8; 16], seed: u64) -> Result<u64> {
    for times in 1..=TRIES {
        cm.say(to, seed + 4)?;
        if cm.hear(to, seed + 5, AGAIN)? {
            return Ok(times);
        }
    }
    bail!("no answer to {TRIES} datagrams of QP 1")
}

/// The passive side answers each until the other has no more to say.
fn respond(cm: &mut Cm, to: [u8; 16], seed: u64, talk: &mut Talk) -> Result<()> {
    let begun = Instant::now();
    talk.say(&json!({}))?;
    while !talk.speaks()? {
        if cm.hear(to, seed + 4, RETRY)? {
            cm.say(to, seed + 5)?;
        }
        ensure!(begun.elapsed() < AGAIN * 20, "the other side says no more");
    }
    Ok(())
}

/// A line-wise conversation.
struct Talk {
    lines: BufReader<TcpStream>,
}

impl Talk {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_read_timeout(Some(patience()))?;
        stream.set_nodelay(true)?;
        Ok(Self { lines: BufReader::new(stream) })
    }

    fn say(&mut self, message: &Value) -> Result<()> {
        let mut line = message.to_string();
        line.push('\n');
        Ok(self.lines.get_mut().write_all(line.as_bytes())?)
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.lines.read_line(&mut line)? > 0, "the peer ended the connection");
        Ok(line)
    }

    /// Whether the other side has said something, or is gone.
    fn speaks(&self) -> Result<bool> {
        let mut fds = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(!self.lines.buffer().is_empty() || poll(&mut fds, Some(&now))? > 0)
    }

    /// An answer that is not `{"error":…}`.
    fn answer(&mut self) -> Result<Value> {
        let value: Value = serde_json::from_str(&self.hear()?)?;
        match value.get("error").and_then(Value::as_str) {
            Some(error) => bail!("the peer says: {error}"),
            None => Ok(value),
        }
    }
}

/// Runs `f` in a process of its own, as the device sees it: what it leaves when it fails goes with
/// its context.
fn in_context(node: &Node, f: impl FnOnce(&Node) -> Result<Value>) -> Result<Value> {
    let ctx = node.guest.open()?;
    let pdn = ctx.create_pd()?;
    let result = f(&Node { ctx: ctx.clone(), pdn, ..node.clone() });
    ctx.destroy()?;
    result
}

/// The active side: everything is checked by the side that received it.
fn transfer(
    node: &Node,
    cm: Option<&mut Cm>,
    (peer, bytes): (SocketAddr, u32),
    qpn: &mut u32,
) -> Result<Value> {
    // No two conversations have the same bytes.
    let seed = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())?;
    let mut side = Side::new(node, bytes, seed)?;
    let half = side.half();
    *qpn = half.qpn;
    let stream = TcpStream::connect_timeout(&peer, patience())
        .with_context(|| format!("cannot reach the peer at {peer}"))?;
    let mut talk = Talk::new(stream)?;
    let mut hello = serde_json::to_value(&half)?;
    if let Some(map) = hello.as_object_mut() {
        map.insert("do".into(), "peer".into());
    }
    talk.say(&hello)?;
    let theirs: Half = serde_json::from_value(talk.answer()?)?;
    side.connect(&theirs)?;
    let from = quietly(|| node.mr_with(&pattern(seed, bytes as usize)))?;
    let into = quietly(|| node.mr(bytes.into()))?;
    side.sent("WRITE", &SendWr::write(3, &[from.sge(0, bytes)], theirs.addr, theirs.rkey))?;
    side.sent(
        "READ",
        &SendWr::read(4, &[into.sge(0, bytes)], theirs.addr + u64::from(bytes), theirs.rkey),
    )?;
    side.same("what was read", &into, 0, seed + 1)?;
    side.send(seed + 2)?;
    talk.say(&json!({"do": "check"}))?;
    talk.answer()?;
    side.received(seed + 3)?;
    let mut datagrams = 0;
    if let Some(cm) = cm {
        talk.say(&json!({"do": "datagram"}))?;
        talk.answer()?;
        datagrams = call(cm, theirs.gid, seed)?;
    }
    talk.say(&json!({"do": "bye"}))?;
    talk.answer()?;
    for mr in [from, into] {
        node.ctx.dereg(mr.lkey)?;
    }
    side.close()?;
    Ok(json!({
        "bytes": 4 * u64::from(bytes), "qpn": half.qpn, "peer_qpn": theirs.qpn,
        "datagrams": datagrams,
    }))
}

/// The passive side, from the peer's first word to its last.
fn serve_peer(node: &Node, cm: Option<&mut Cm>, theirs: &Half, talk: &mut Talk) -> Result<Value> {
    let mut side = Side::new(node, theirs.bytes, theirs.seed)?;
    side.connect(theirs)?;
    talk.say(&serde_json::to_value(side.half())?)?;
    let word: Request = serde_json::from_str(&talk.hear()?)?;
    ensure!(matches!(word, Request::Check), "expected check");
    side.same("what was written", &side.shared, 0, theirs.seed)?;
    side.received(theirs.seed + 2)?;
    side.send(theirs.seed + 3)?;
    talk.say(&json!({}))?;
    let mut word: Request = serde_json::from_str(&talk.hear()?)?;
    if matches!(word, Request::Datagram) {
        let cm = cm.context("this guest has no address, so it does not use QP 1")?;
        respond(cm, theirs.gid, theirs.seed, talk)?;
        word = serde_json::from_str(&talk.hear()?)?;
    }
    ensure!(matches!(word, Request::Bye), "expected bye");
    side.close()?;
    Ok(json!({}))
}

/// What `status` tells.
struct Seen {
    session: u32,
    qpn: u32,
}

fn answer(session: &mut Option<Session>, seen: &mut Seen, talk: &mut Talk) -> Result<Value> {
    let request: Request = serde_json::from_str(&talk.hear()?).context("no request")?;
    let Some(session) = session else {
        return match request {
            Request::Status => Ok(json!({"session": seen.session, "connected": false})),
            _ => bail!("not connected to a NIC"),
        };
    };
    session.mend()?;
    let Session { node, cm, lives, .. } = session;
    match request {
        Request::Status => {
            node.guest.keepalive()?;
            Ok(json!({
                "session": seen.session, "life": lives, "connected": true,
                "mac": node.guest.device().mac, "gid": node.gid, "qpn": seen.qpn
            }))
        }
        Request::Transfer { peer, bytes } => {
            in_context(node, |node| transfer(node, cm.as_mut(), (peer, bytes), &mut seen.qpn))
        }
        Request::Peer(half) => in_context(node, |node| serve_peer(node, cm.as_mut(), &half, talk)),
        Request::Check | Request::Datagram | Request::Bye => bail!("not in a transfer"),
    }
}

/// Waits for a request or for the end of the session; a request's connection.
fn next(listener: &TcpListener, session: &mut Option<Session>) -> Result<Option<TcpStream>> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    if let Some(session) = session.as_ref() {
        fds.push(PollFd::new(&session.watch, PollFlags::RDHUP | PollFlags::HUP));
    }
    let pause = Timespec { tv_sec: 0, tv_nsec: RETRY.subsec_nanos().into() };
    poll(&mut fds, if session.is_some() { None } else { Some(&pause) })?;
    let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
    drop(fds);
    if ready.get(1) == Some(&true) {
        eprintln!("the daemon ended the session");
        *session = None;
    }
    Ok(if ready.first() == Some(&true) { Some(listener.accept()?.0) } else { None })
}

/// The socket that the agent gave to this container.
fn given() -> Result<PathBuf> {
    let mut sockets: Vec<PathBuf> = std::env::vars()
        .filter(|(name, value)| name.starts_with("VHOST_RDMA_") && value.ends_with(".sock"))
        .map(|(_, value)| value.into())
        .collect();
    sockets.sort();
    sockets.dedup();
    match sockets.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!("no variable VHOST_RDMA_… names a socket: was this container given a NIC?"),
        many => bail!("this container has {} NICs: say which with --socket", many.len()),
    }
}

fn run() -> Result<()> {
    let args = Args::parse();
    let socket = args.socket.clone().map_or_else(given, Ok)?;
    let listener = TcpListener::bind(args.listen)?;
    let mut session: Option<Session> = None;
    let mut seen = Seen { session: 0, qpn: 0 };
    let mut since = Instant::now();
    loop {
        if session.is_none() && !(args.no_reconnect && seen.session > 0) {
            match Session::open(&socket, &args) {
                Ok(new) => {
                    seen.session += 1;
                    eprintln!("session {} on {}", seen.session, socket.display());
                    session = Some(new);
                }
                Err(e) if since.elapsed() > Duration::from_secs(args.patience) => return Err(e),
                Err(e) if seen.session == 0 => eprintln!("{e:#}"),
                Err(_) => {}
            }
        }
        let had_one = session.is_some();
        let asked = next(&listener, &mut session)?;
        // Patience begins when a session has ended, not when it was last spoken to.
        if had_one {
            since = Instant::now();
        }
        let Some(stream) = asked else { continue };
        let mut talk = Talk::new(stream)?;
        let said = answer(&mut session, &mut seen, &mut talk)
            .unwrap_or_else(|e| json!({"error": format!("{e:#}")}));
        if let Err(e) = talk.say(&said) {
            eprintln!("no answer: {e:#}");
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
