//! What can happen. Numbers select among what there is at the time, so that any sequence means
//! something and shrinks well.

use proptest::prelude::*;

/// How a request names memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    /// Region of the guest whose memory it is.
    Region(u8),
    /// Window of the guest whose memory it is.
    Window(u8),
    /// The last region that was withdrawn.
    Stale,
    /// A key of the other guest.
    Foreign(u8),
}

/// Where and how much.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) key: Key,
    offset: u16,
}

impl Place {
    /// Windows are small.
    pub(super) const fn offset(&self) -> u16 {
        if matches!(self.key, Key::Window(_)) { self.offset % 32 } else { self.offset }
    }
}

/// The kinds of posted sends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Post {
    Send,
    SendInvalidate(u8),
    Write,
    WriteImmediate,
    Read,
    FetchAdd(u64),
    CompareSwap(bool, u64),
}

/// One step. `side` is a guest, `line` a connection.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Connect {
        line: u8,
        domains: [bool; 2],
    },
    Reconnect {
        line: u8,
    },
    Destroy {
        side: bool,
        line: u8,
    },
    Error {
        side: bool,
        line: u8,
    },
    BadIndex {
        side: bool,
        line: u8,
    },
    Drain {
        side: bool,
        line: u8,
    },
    GoOn {
        side: bool,
        line: u8,
    },
    Register {
        side: bool,
        region: u8,
        rights: u8,
        domain: bool,
    },
    Reregister {
        side: bool,
        region: u8,
        rights: u8,
        domain: bool,
    },
    Deregister {
        side: bool,
        region: u8,
    },
    AllocateWindow {
        side: bool,
        window: u8,
        domain: bool,
    },
    FreeWindow {
        side: bool,
        window: u8,
    },
    Bind {
        side: bool,
        line: u8,
        window: u8,
        place: Place,
        len: u16,
        rights: u8,
    },
    Invalidate {
        side: bool,
        line: u8,
        window: u8,
    },
    CreateShared {
        side: bool,
    },
    Limit {
        side: bool,
        limit: u8,
    },
    Post {
        side: bool,
        line: u8,
        what: Post,
        local: Place,
        remote: Place,
        len: u16,
    },
    /// Several posts, of which the engine sees the last as soon as the first.
    Burst {
        side: bool,
        line: u8,
        posts: Vec<(Post, Place, Place, u16)>,
    },
    Receive {
        side: bool,
        line: u8,
        into: Place,
        len: u16,
    },
    ReceiveShared {
        side: bool,
        into: Place,
        len: u16,
    },
    ResizeCq {
        side: bool,
        line: u8,
    },
    TimePasses,
    /// Another process goes on; `at_once`: without a wait for what is under way.
    HandOver {
        at_once: bool,
    },
    /// NICs move while what was begun before goes on: after so many rounds each.
    Move {
        side: bool,
        rounds: u8,
    },
    ResetNic {
        side: bool,
    },
}

/// A place of one's own; `windows`: how often its key is a window's, which only peers may use.
fn place_with(windows: u32) -> impl Strategy<Value = Place> {
    let key = prop_oneof![
        40 => (0u8..4).prop_map(Key::Region),
        windows => (0u8..2).prop_map(Key::Window),
        1 => Just(Key::Stale),
        1 => (0u8..4).prop_map(Key::Foreign),
    ];
    // Mostly aligned and inside.
    let offset = prop_oneof![20 => (0u16..10).prop_map(|n| n * 8), 1 => 0u16..600];
    (key, offset).prop_map(|(key, offset)| Place { key, offset })
}

fn place() -> impl Strategy<Value = Place> {
    place_with(1)
}

/// Lengths from here on mean: to the end of what the key opens, less two bytes and so on.
pub(super) const TO_THE_END: u16 = 1000;

fn len() -> impl Strategy<Value = u16> {
    prop_oneof![1 => Just(0u16), 8 => 1u16..100, 1 => 100u16..700, 2 => TO_THE_END..TO_THE_END + 4]
}

fn post() -> impl Strategy<Value = Post> {
    prop_oneof![
        6 => Just(Post::Send),
        2 => (0u8..2).prop_map(Post::SendInvalidate),
        5 => Just(Post::Write),
        2 => Just(Post::WriteImmediate),
        3 => Just(Post::Read),
        2 => any::<u64>().prop_map(Post::FetchAdd),
        2 => any::<(bool, u64)>().prop_map(|(hit, new)| Post::CompareSwap(hit, new)),
    ]
}

/// A beginning with which most steps find what they need; with shared queues, or without.
pub(super) fn furnished(shared: bool) -> Vec<Op> {
    let sides = [false, true];
    let queues = sides.map(|side| Op::CreateShared { side });
    let mut ops: Vec<Op> = queues.into_iter().filter(|_| shared).collect();
    for side in sides {
        ops.extend((0..4).map(|region| Op::Register {
            side,
            region,
            rights: 0,
            domain: region == 3,
        }));
        ops.extend((0..2).map(|window| Op::AllocateWindow { side, window, domain: false }));
    }
    // One QP of another domain than its shared queue.
    ops.extend((0..3).map(|line| Op::Connect { line, domains: [false, line == 1] }));
    ops
}

/// Any step.
pub(super) fn op() -> impl Strategy<Value = Op> {
    // Uneven, so that steps meet.
    let at =
        || (prop::bool::weighted(0.3), prop_oneof![5 => Just(0u8), 3 => Just(1), 2 => Just(2)]);
    let domain = || prop::bool::weighted(0.15);
    prop_oneof![
        8 => (0u8..3, [domain(), domain()])
            .prop_map(|(line, domains)| Op::Connect { line, domains }),
        14 => (0u8..3).prop_map(|line| Op::Reconnect { line }),
        1 => at().prop_map(|(side, line)| Op::Destroy { side, line }),
        1 => at().prop_map(|(side, line)| Op::Error { side, line }),
        1 => at().prop_map(|(side, line)| Op::BadIndex { side, line }),
        4 => at().prop_map(|(side, line)| Op::Drain { side, line }),
        3 => at().prop_map(|(side, line)| Op::GoOn { side, line }),
        10 => (any::<bool>(), 0u8..4, 0u8..6, domain())
            .prop_map(|(side, region, rights, domain)| {
                Op::Register { side, region, rights, domain }
            }),
        3 => (any::<bool>(), 0u8..4, 0u8..6, domain())
            .prop_map(|(side, region, rights, domain)| {
                Op::Reregister { side, region, rights, domain }
            }),
        2 => (any::<bool>(), 0u8..4).prop_map(|(side, region)| Op::Deregister { side, region }),
        3 => (any::<bool>(), 0u8..2, domain())
            .prop_map(|(side, window, domain)| Op::AllocateWindow { side, window, domain }),
        1 => (any::<bool>(), 0u8..2).prop_map(|(side, window)| Op::FreeWindow { side, window }),
        8 => (at(), 0u8..2, place(), len(), 0u8..4)
            .prop_map(|((side, line), window, place, len, rights)| {
                Op::Bind { side, line, window, place, len, rights }
            }),
        2 => (at(), 0u8..2)
            .prop_map(|((side, line), window)| Op::Invalidate { side, line, window }),
        2 => any::<bool>().prop_map(|side| Op::CreateShared { side }),
        4 => (any::<bool>(), 0u8..5).prop_map(|(side, limit)| Op::Limit { side, limit }),
        30 => (at(), post(), place(), place_with(30), len())
            .prop_map(|((side, line), what, local, remote, len)| {
                Op::Post { side, line, what, local, remote, len }
            }),
        12 => (at(), place(), len())
            .prop_map(|((side, line), into, len)| Op::Receive { side, line, into, len }),
        10 => (any::<bool>(), place(), len())
            .prop_map(|(side, into, len)| Op::ReceiveShared { side, into, len }),
        1 => at().prop_map(|(side, line)| Op::ResizeCq { side, line }),
        3 => Just(Op::TimePasses),
        4 => any::<bool>().prop_map(|at_once| Op::HandOver { at_once }),
        8 => (any::<bool>(), 0u8..6).prop_map(|(side, rounds)| Op::Move { side, rounds }),
        1 => prop::bool::ANY.prop_map(|side| Op::ResetNic { side }),
    ]
}

/// Steps that leave much under way: bursts, and what happens to either end meanwhile. There are no
/// shared queues: which of two QPs that wait at one gets the next receive nobody promises, and it
/// depends on what has gone ahead.
pub(super) fn busy() -> impl Strategy<Value = Op> {
    let what = prop_oneof![
        4 => Just(Post::Send),
        6 => Just(Post::Write),
        2 => Just(Post::WriteImmediate),
        1 => post(),
    ];
    let len = prop_oneof![6 => 1u16..100, 1 => len()];
    let posts = prop::collection::vec((what, place(), place(), len), 2..10);
    let receive = || (any::<bool>(), place(), 100u16..400);
    prop_oneof![
        6 => (any::<bool>(), 0u8..3, posts)
            .prop_map(|(side, line, posts)| Op::Burst { side, line, posts }),
        6 => (receive(), 0u8..3)
            .prop_map(|((side, into, len), line)| Op::Receive { side, line, into, len }),
        2 => (any::<bool>(), 0u8..6).prop_map(|(side, rounds)| Op::Move { side, rounds }),
        2 => any::<bool>().prop_map(|at_once| Op::HandOver { at_once }),
        2 => (any::<bool>(), 0u8..3).prop_map(|(side, line)| Op::Drain { side, line }),
        2 => (any::<bool>(), 0u8..3).prop_map(|(side, line)| Op::GoOn { side, line }),
        6 => op().prop_filter("no shared queues", |op| !matches!(op, Op::CreateShared { .. })),
    ]
}
