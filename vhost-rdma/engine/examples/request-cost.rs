//! What a work request costs the engine, without a guest, a thread or a socket: for profilers, and
//! for counting instructions where the machine's own counters are not to be had.
//!
//! docs/PERFORMANCE.md says how, and what came out.
//!
//! Two NICs of one network write, read or send to each other. The work requests are written once,
//! so that nothing but the engine is measured.

use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use vhost_rdma_engine::link::NicId;
use vhost_rdma_engine::nic::Step;
use vhost_rdma_engine::shard::{
    Command, Limits, NicSettings, Port, Random, Reply, Shard, Status, control_offset,
};
use vhost_rdma_memory::{AddressSpace, PageList, Ring, Translation};
use virtio_rdma_abi::{self as abi, attr_mask as m, opcode, qps, qpt, send_flags};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Where a guest's data lie, behind its rings: a window in one piece.
const DATA: u64 = 320 << 20;
/// Bytes of each guest's memory; what is not used takes none of the host's.
const RAM: u64 = DATA + WINDOW;
/// The first doorbell page; others follow, as many as queue pairs need.
const DOORBELLS: u64 = 0x1000;
/// Where rings begin.
const RINGS: u64 = 0x10_0000;
/// Bytes of the window.
const WINDOW: u64 = 4 << 20;
/// One signaled work request in so many.
const BATCH: u32 = 32;

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Verb {
    Write,
    Read,
    Send,
}

#[derive(Debug, Parser)]
#[command(about = "Nanoseconds of the engine for each work request")]
struct Args {
    verb: Verb,
    /// Bytes of each message
    size: u32,
    /// Work requests to execute
    #[arg(long, default_value_t = 4_000_000)]
    requests: u32,
    /// Entries of each ring
    #[arg(long, default_value_t = 1024)]
    entries: u32,
    /// Queue pairs, in turn
    #[arg(long, default_value_t = 1)]
    qps: u32,
    /// Memory regions on either side, in turn
    #[arg(long, default_value_t = 1)]
    regions: u32,
    /// Bytes on either side that messages take turns in, at least one message
    #[arg(long, default_value_t = WINDOW)]
    window: u64,
    /// One request is under way at a time, and each is signaled
    #[arg(long)]
    one_by_one: bool,
    /// Contexts of either guest; all but one are idle
    #[arg(long, default_value_t = 1)]
    contexts: u32,
    /// Guests beside these that are idle
    #[arg(long, default_value_t = 0)]
    idle: u32,
}

impl Args {
    /// One of so many requests is signaled.
    const fn batch(&self) -> u32 {
        if self.one_by_one { 1 } else { BATCH }
    }
}

/// Numbers that repeat.
#[derive(Debug)]
struct Lcg(u64);

impl Random for Lcg {
    fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }
}

/// Nobody hears of events.
#[derive(Debug)]
struct Silent;

impl Port for Silent {
    fn completion_event(&mut self, _: u32, _: abi::CompEvent) -> bool {
        true
    }

    fn async_event(&mut self, event: abi::AsyncEvent) -> bool {
        eprintln!("{event:?}");
        true
    }

    fn flush(&mut self) {}
}

/// A guest and what it has laid out in its memory.
struct Guest {
    nic: NicId,
    gid: [u8; 16],
    space: AddressSpace,
    ram: Ring,
    whole: Arc<Translation>,
    next: u64,
    /// Its last doorbell page.
    doorbells: u64,
    ctx: u32,
    pd: u32,
    /// Bytes of each of its regions.
    bytes: u64,
    keys: Vec<u32>,
}

/// A ring, and the same memory as the guest sees it.
struct Queue {
    number: u32,
    ring: Ring,
    doorbell: u32,
    posted: u32,
}

fn execute(shard: &mut Shard, nic: NicId, ctx: u32, command: Command) -> anyhow::Result<Reply> {
    let mut command = command;
    loop {
        command = match shard.execute(nic, ctx, command, 1) {
            Ok(Step::Blocking(job)) => job.run(),
            Ok(Step::More) => Command::Continue,
            Ok(Step::Done(reply)) => return Ok(reply),
            Err(Status(status)) => anyhow::bail!("a command was refused with {status}"),
        };
    }
}

impl Guest {
    fn new(shard: &mut Shard, host: u16, regions: u32) -> anyhow::Result<Self> {
        let [high, low] = host.to_be_bytes();
        let limits = Limits {
            max_contexts: 1024,
            max_pds: 8,
            max_mrs: 1 << 20,
            max_mr_bytes: u64::MAX,
            max_cqs: 8,
            max_srqs: 1,
            max_qps: 1 << 15,
            max_ahs: 1,
        };
        let settings = NicSettings {
            number: 0,
            vni: 1,
            mac: [2, 0, 0, 0, high, low],
            gids: Vec::new(),
            comp_vectors: 1,
            kick_queues: 1,
            limits,
        };
        let nic = shard.add_nic(settings, Box::new(Silent));
        let space = AddressSpace::anonymous(&[(0, usize::try_from(RAM)?)])?;
        let map = Arc::new(whole(&space, 0, RAM)?);
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, high, low]);
        let page = |at| Ring::page(&space, at).map_err(|fault| anyhow::anyhow!("{fault:?}"));
        let (status_page, db_page) = (page(0)?, page(DOORBELLS)?);
        let init = Command::Init { space: space.clone(), status_page };
        execute(shard, nic, 0, init)?;
        let Reply::Context(made) = execute(shard, nic, 0, Command::ContextCreate { db_page })?
        else {
            anyhow::bail!("no context")
        };
        execute(shard, nic, 0, Command::GidSet { index: 1, gid: Some(gid) })?;
        let ctx = made.ctx.get();
        let Reply::Object(pd) = execute(shard, nic, ctx, Command::PdCreate)? else {
            anyhow::bail!("no domain")
        };
        let ram = Ring::new(Arc::clone(&map));
        // What all of them together have is limited.
        let bytes = if regions == 1 { WINDOW } else { 4096 };
        let mut guest = Self {
            nic,
            gid,
            space,
            ram,
            whole: map,
            next: RINGS,
            doorbells: DOORBELLS,
            ctx,
            pd,
            bytes,
            keys: Vec::new(),
        };
        for _ in 0..regions {
            guest.register(shard)?;
        }
        Ok(guest)
    }

    /// Writes to each page of the window: one that nobody wrote is a page of zeros under many
    /// addresses, which is slower.
    fn touch(&self) {
        for at in (DATA..DATA + WINDOW).step_by(4096) {
            self.ram.store_u8(at, 1);
        }
    }

    /// Registers the window once more; addresses are the guest's own.
    fn register(&mut self, shard: &mut Shard) -> anyhow::Result<()> {
        let map = Arc::new(whole(&self.space, DATA, self.bytes)?);
        let request = Command::MrReg { pdn: self.pd, access: 0xf, iova: DATA, map };
        let Reply::Mr(made) = execute(shard, self.nic, self.ctx, request)? else {
            anyhow::bail!("no region")
        };
        self.keys.push(made.rkey.get());
        Ok(())
    }

    fn alloc(&mut self, bytes: u64) -> anyhow::Result<u64> {
        let at = self.next;
        self.next += bytes.next_multiple_of(4096);
        anyhow::ensure!(self.next <= DATA, "the guest's memory is used up");
        Ok(at)
    }

    /// A ring whose pages lie backwards, as those of a real driver lie anywhere.
    fn ring(&mut self, bytes: u64) -> anyhow::Result<Ring> {
        let pages = bytes.div_ceil(4096);
        anyhow::ensure!(pages <= 512, "one list page has room for 512");
        let (list, at) = (self.alloc(4096)?, self.alloc(pages * 4096)?);
        for n in 0..pages {
            self.ram.write(list + n * 8, &(at + (pages - 1 - n) * 4096).to_le_bytes());
        }
        let npages = u32::try_from(pages)?;
        let list = PageList { addr: list, npages, page_shift: 12, levels: 1, offset: 0 };
        let map = list.resolve(&self.space, bytes).map_err(|fault| anyhow::anyhow!("{fault:?}"))?;
        Ok(Ring::new(Arc::new(map)))
    }

    fn cq(&mut self, shard: &mut Shard, entries: u32) -> anyhow::Result<(u32, Ring)> {
        let ring = self.ring(control_offset(u64::from(entries) * 64) + 128)?;
        let request = Command::CqCreate { entries, vector: 0, ring: ring.clone() };
        match execute(shard, self.nic, self.ctx, request)? {
            Reply::Object(cqn) => Ok((cqn, ring)),
            _ => anyhow::bail!("no completion queue"),
        }
    }

    /// A page for doorbells, behind the others.
    fn doorbells(&mut self) -> anyhow::Result<Ring> {
        self.doorbells += 4096;
        anyhow::ensure!(self.doorbells < RINGS, "no room for so many doorbells");
        Ring::page(&self.space, self.doorbells).map_err(|fault| anyhow::anyhow!("{fault:?}"))
    }

    fn add_doorbells(&mut self, shard: &mut Shard) -> anyhow::Result<()> {
        let db_page = self.doorbells()?;
        execute(shard, self.nic, self.ctx, Command::DbPageAdd { db_page }).map(drop)
    }

    /// A context in which nothing happens.
    fn add_context(&mut self, shard: &mut Shard) -> anyhow::Result<()> {
        let db_page = self.doorbells()?;
        execute(shard, self.nic, 0, Command::ContextCreate { db_page }).map(drop)
    }

    /// A queue pair: its number, its queue to send from, its queue to receive into.
    fn qp(&mut self, shard: &mut Shard, cqn: u32, entries: u32) -> anyhow::Result<[Queue; 2]> {
        let (sq, rq) = (self.ring(u64::from(entries) * 64)?, self.ring(u64::from(entries) * 32)?);
        let req = abi::QpCreateReq {
            pdn: U32::new(self.pd),
            r#type: U32::new(qpt::RC),
            send_cqn: U32::new(cqn),
            recv_cqn: U32::new(cqn),
            srqn: U32::new(abi::NO_SRQ),
            sq_entries: U32::new(entries),
            rq_entries: U32::new(entries),
            max_send_wr: U32::new(entries),
            max_recv_wr: U32::new(entries),
            max_send_sge: U16::new(1),
            max_recv_sge: U16::new(1),
            sq_log2_stride: 6,
            rq_log2_stride: 5,
            ..abi::QpCreateReq::default()
        };
        let command =
            Command::QpCreate { req: Box::new(req), sq: Some(sq.clone()), rq: Some(rq.clone()) };
        let Reply::Qp(made) = execute(shard, self.nic, self.ctx, command)? else {
            anyhow::bail!("no queue pair")
        };
        let number = made.qpn.get();
        Ok([(sq, made.sq_db), (rq, made.rq_db)].map(|(ring, doorbell)| Queue {
            number,
            ring,
            doorbell: doorbell.get(),
            posted: 0,
        }))
    }

    fn connect(&self, shard: &mut Shard, qpn: u32, peer: (u32, [u8; 16])) -> anyhow::Result<()> {
        let av = abi::Av {
            dgid: peer.1,
            sgid_index: U16::new(1),
            port_num: 1,
            flags: abi::av_flags::GRH,
            hop_limit: 64,
            ..abi::Av::default()
        };
        let base = abi::QpAttr {
            port_num: 1,
            qp_access_flags: U32::new(0xf),
            path_mtu: 5,
            dest_qpn: U32::new(peer.0),
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 2,
            rnr_retry: 7,
            ah: av,
            ..abi::QpAttr::default()
        };
        let steps = [
            (qps::INIT, m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS),
            (
                qps::RTR,
                m::AV
                    | m::PATH_MTU
                    | m::DEST_QPN
                    | m::RQ_PSN
                    | m::MAX_DEST_RD_ATOMIC
                    | m::MIN_RNR_TIMER,
            ),
            (qps::RTS, m::SQ_PSN | m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC),
        ];
        for (state, mask) in steps {
            let attr = abi::QpAttr { mask: U32::new(m::STATE | mask), qp_state: state, ..base };
            let command = Command::QpModify { qpn, attr: Box::new(attr) };
            execute(shard, self.nic, self.ctx, command)?;
        }
        Ok(())
    }

    fn post(&self, queue: &mut Queue, count: u32) {
        queue.posted = queue.posted.wrapping_add(count);
        let page = DOORBELLS + u64::from(queue.doorbell >> abi::db::PAGE_SHIFT) * 4096;
        let slot = u64::from(queue.doorbell & 0xffff);
        self.ram.store_u32(page + abi::db::INDEX as u64 + 4 * slot, queue.posted);
        self.ram.store_u8(page + slot / 64, 1);
    }
}

/// A map of guest memory in one piece.
fn whole(space: &AddressSpace, at: u64, bytes: u64) -> anyhow::Result<Translation> {
    let npages = u32::try_from(bytes >> 12)?;
    let list = PageList { addr: at, npages, page_shift: 12, ..PageList::default() };
    list.resolve(space, bytes).map_err(|fault| anyhow::anyhow!("{fault:?}"))
}

/// A queue pair's work requests, one a ring entry; entries name regions in turn.
fn fill(args: &Args, ends: (&Guest, &Guest), queues: (&Queue, &Queue), first: u32) {
    let ((a, b), (send, receive)) = (ends, queues);
    for i in 0..args.entries {
        // Neighbours in the ring are no neighbours in the table.
        let region = ((first + i).wrapping_mul(7919) % args.regions) as usize;
        let step = u64::from(args.size).next_multiple_of(64);
        let places = a.bytes.min(args.window.max(step));
        let at = DATA + u64::from(i) * step % places;
        let sge = |key: u32| abi::Sge {
            addr: U64::new(at),
            length: U32::new(args.size),
            lkey: U32::new(key),
        };
        let signaled = if i % args.batch() == args.batch() - 1 { send_flags::SIGNALED } else { 0 };
        let wqe = abi::SqWqe {
            wr_id: U64::new(i.into()),
            opcode: match args.verb {
                Verb::Write => opcode::RDMA_WRITE,
                Verb::Read => opcode::RDMA_READ,
                Verb::Send => opcode::SEND,
            },
            flags: signaled,
            num_sge: U16::new(1),
            remote_addr: U64::new(at),
            rkey: U32::new(b.keys[region]),
            ..abi::SqWqe::default()
        };
        send.ring.write(u64::from(i) * 64, wqe.as_bytes());
        send.ring.write(u64::from(i) * 64 + 48, sge(a.keys[region]).as_bytes());
        let wqe = abi::RqWqe { num_sge: U16::new(1), ..abi::RqWqe::default() };
        receive.ring.write(u64::from(i) * 32, wqe.as_bytes());
        receive.ring.write(u64::from(i) * 32 + 16, sge(b.keys[region]).as_bytes());
    }
}

/// Processor time of this thread so far, in seconds; known to a tick.
fn processor() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos: u64 = stat.split(' ').next().context("an empty schedstat")?.parse()?;
    Ok(nanos as f64 / 1e9)
}

/// Rounds until one finds nothing to do.
#[inline(never)]
fn measured(shard: &mut Shard, now: &mut u64) {
    while shard.poll(*now) {
        *now += 1000;
    }
}

/// Rounds until a NIC has this many completions. Of many doorbell pages a round looks at some, so
/// one that finds nothing is not the end.
fn complete(shard: &mut Shard, now: &mut u64, (nic, count): (NicId, u32)) -> anyhow::Result<()> {
    for _ in 0..64 {
        measured(shard, now);
        *now += 1000;
        let status = shard.status(nic).context("the NIC is gone")?;
        if status.counters.completions >= u64::from(count) {
            return Ok(());
        }
    }
    anyhow::bail!("completions stopped before {count}")
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut shard = Shard::new(Box::new(Lcg(7)));
    let mut a = Guest::new(&mut shard, 1, args.regions)?;
    let mut b = Guest::new(&mut shard, 2, args.regions)?;
    for guest in [&mut a, &mut b] {
        guest.touch();
        (1..args.contexts).try_for_each(|_| guest.add_context(&mut shard))?;
    }
    let others = (0..args.idle).map(|n| Guest::new(&mut shard, u16::try_from(n + 3)?, 1));
    let _idle: Vec<Guest> = others.collect::<anyhow::Result<_>>()?;
    let ((cqn, cq), (rcqn, rcq)) = (a.cq(&mut shard, 1024)?, b.cq(&mut shard, 16384)?);
    let mut pairs = Vec::new();
    for n in 0..args.qps {
        // Two doorbells each; the first page is there.
        if n % (abi::db::SLOTS / 2) == 0 && n > 0 {
            a.add_doorbells(&mut shard)?;
            b.add_doorbells(&mut shard)?;
        }
        let [send, _] = a.qp(&mut shard, cqn, args.entries)?;
        let [_, receive] = b.qp(&mut shard, rcqn, args.entries)?;
        a.connect(&mut shard, send.number, (receive.number, b.gid))?;
        b.connect(&mut shard, receive.number, (send.number, a.gid))?;
        fill(&args, (&a, &b), (&send, &receive), n * args.entries);
        pairs.push((send, receive));
    }
    let (mut done, mut now, before) = (0, 1, processor()?);
    let (batch, burst) = (args.batch(), if args.one_by_one { 1 } else { args.entries });
    let most = if args.one_by_one { 1 } else { 16 * 1024 };
    let mut settle = |done: u32| {
        for guest in [&a, &b] {
            if guest.ram.load_u32(abi::status_page::NEED_KICK as u64) != 0 {
                shard.kicked(guest.nic);
            }
        }
        complete(&mut shard, &mut now, (a.nic, done / batch))?;
        let consumed = |cq: &Ring, entries: u64, index: u32| {
            cq.store_u32(control_offset(entries * 64) + abi::ctrl::CONSUMER as u64, index);
        };
        consumed(&cq, 1024, done / batch);
        consumed(&rcq, 16384, if args.verb == Verb::Send { done } else { 0 });
        anyhow::Ok(())
    };
    while done < args.requests {
        let mut posted = 0;
        for (send, receive) in &mut pairs {
            if args.verb == Verb::Send {
                b.post(receive, burst);
            }
            a.post(send, burst);
            posted += burst;
            if posted >= most {
                done += std::mem::take(&mut posted);
                settle(done)?;
            }
        }
        if posted > 0 {
            done += posted;
            settle(done)?;
        }
    }
    let took = processor()? - before;
    let status = shard.status(a.nic).context("the NIC is gone")?;
    let completed = status.counters.completions;
    anyhow::ensure!(completed == u64::from(done / batch), "{completed} completions of {done}");
    anyhow::ensure!(status.counters.completion_errors == 0, "some failed");
    println!("{:.1} ns/request", took / f64::from(done) * 1e9);
    let _kept = (a.whole, b.whole);
    Ok(())
}
