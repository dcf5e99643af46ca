//! Chains that a guest may make up.

use proptest::prelude::*;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_rdma_abi as abi;

use super::*;

const READ: u16 = 0;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Where the tests keep buffers, out of the way of the queue at address 0.
const DATA: u64 = 0x8000;

fn memory() -> AddressSpace {
    AddressSpace::anonymous(&[(0, 0x10000), (0x10000, 0x10000)]).expect("anonymous memory")
}

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor::from(Descriptor::new(addr, len, flags, next))
}

/// Puts descriptors 0… into the table, makes `head` available, and takes the chain.
fn offer(memory: &AddressSpace, descriptors: &[RawDescriptor], head: u16) -> Taken {
    let vq = MockSplitQueue::new(memory, 16);
    for (index, descriptor) in descriptors.iter().enumerate() {
        vq.desc_table()
            .store(u16::try_from(index).expect("few"), *descriptor)
            .expect("in the table");
    }
    vq.avail().ring().ref_at(0).expect("in the ring").store(head);
    vq.avail().idx().store(1);
    let mut queue: Queue = vq.create_queue().expect("a valid queue");
    let taken = take(&mut queue, memory, DESCRIPTORS_MAX);
    assert_eq!(queue.next_avail(), 1, "the chain is consumed whatever it is");
    assert!(matches!(take(&mut queue, memory, DESCRIPTORS_MAX), Taken::Empty));
    taken
}

fn chain(taken: Taken) -> Box<Chain> {
    match taken {
        Taken::Chain(chain) => chain,
        other => panic!("expected a chain, got {other:?}"),
    }
}

#[test]
fn room_for_every_request_and_response() {
    let longest = abi::STRUCTS.iter().map(|s| s.size).max().expect("structs");
    assert!(longest + size_of::<abi::CmdHdr>() <= REQUEST_MAX);
    assert!(longest + size_of::<abi::RespHdr>() <= RESPONSE_MAX);
}

#[test]
fn a_request_cut_into_pieces_is_one_request() {
    let memory = memory();
    memory.write_slice(b"abcdefgh", GuestAddress(DATA)).expect("in memory");
    let taken = offer(
        &memory,
        &[
            desc(DATA, 3, NEXT, 1),
            desc(DATA + 3, 0, NEXT, 2),
            desc(DATA + 3, 5, NEXT, 3),
            desc(DATA + 0x100, 1, NEXT | WRITE, 4),
            desc(DATA + 0x200, 0, NEXT | WRITE, 5),
            desc(DATA + 0x300, 9, WRITE, 0),
        ],
        0,
    );
    let chain = chain(taken);
    assert_eq!(chain.request().bytes, b"abcdefgh");
    assert!(chain.request().whole);
    assert_eq!(chain.room(), 10);
    assert_eq!(chain.respond(&memory, b"0123"), 4);
    let mut first = [0; 2];
    memory.read_slice(&mut first, GuestAddress(DATA + 0x100)).expect("in memory");
    assert_eq!(&first, b"0\0");
    let mut second = [0; 4];
    memory.read_slice(&mut second, GuestAddress(DATA + 0x300)).expect("in memory");
    assert_eq!(&second, b"123\0");
}

#[test]
fn what_is_longer_than_any_request_is_not_whole() {
    let memory = memory();
    let descriptors = [desc(DATA, 0x4000, NEXT, 1), desc(DATA, 0x4000, WRITE, 0)];
    let chain = chain(offer(&memory, &descriptors, 0));
    assert_eq!((chain.request().bytes.len(), chain.request().whole), (REQUEST_MAX, false));
    assert_eq!(chain.room(), RESPONSE_MAX);
}

#[test]
fn a_buffer_across_two_regions_is_one_buffer() {
    let memory = memory();
    let chain = chain(offer(&memory, &[desc(0xfff0, 32, NEXT, 1), desc(0xfff8, 16, WRITE, 0)], 0));
    assert_eq!(chain.request().bytes.len(), 32);
    assert_eq!(chain.respond(&memory, &[7; 16]), 16);
}

#[test]
fn an_indirect_table_is_followed_once() {
    let memory = memory();
    let table = [desc(DATA, 4, NEXT, 1), desc(DATA + 64, 8, WRITE, 0)];
    for (index, descriptor) in table.iter().enumerate() {
        memory
            .write_obj(*descriptor, GuestAddress(DATA + 0x1000 + index as u64 * 16))
            .expect("in memory");
    }
    let good = chain(offer(&memory, &[desc(DATA + 0x1000, 32, INDIRECT, 0)], 0));
    assert_eq!((good.request().bytes.len(), good.room()), (4, 8));

    // A table inside a table.
    memory
        .write_obj(desc(DATA + 0x1000, 32, INDIRECT, 0), GuestAddress(DATA + 0x2000))
        .expect("in memory");
    let nested = offer(&memory, &[desc(DATA + 0x2000, 16, INDIRECT, 0)], 0);
    assert!(matches!(nested, Taken::Malformed(0)));
}

#[test]
fn what_is_not_whole_is_malformed() {
    let memory = memory();
    let cases: [(&str, Vec<RawDescriptor>); 9] = [
        ("next out of the table", vec![desc(DATA, 4, NEXT, 99)]),
        ("a loop", vec![desc(DATA, 4, NEXT, 1), desc(DATA, 4, NEXT, 0)]),
        ("writable before readable", vec![desc(DATA, 8, NEXT | WRITE, 1), desc(DATA, 4, READ, 0)]),
        (
            "empty writable before readable",
            vec![desc(DATA, 0, NEXT | WRITE, 1), desc(DATA, 4, READ, 0)],
        ),
        ("request outside memory", vec![desc(0x20000, 4, NEXT, 1), desc(DATA, 8, WRITE, 0)]),
        ("request beyond the end of memory", vec![desc(0x1fffe, 4, READ, 0)]),
        ("response outside memory", vec![desc(DATA, 4, NEXT, 1), desc(u64::MAX - 3, 8, WRITE, 0)]),
        ("odd indirect table", vec![desc(DATA, 17, INDIRECT, 0)]),
        ("indirect table outside memory", vec![desc(0xffff_0000, 32, INDIRECT, 0)]),
    ];
    for (what, descriptors) in cases {
        let taken = offer(&memory, &descriptors, 0);
        assert!(matches!(taken, Taken::Malformed(0)), "{what}: {taken:?}");
    }
    assert!(matches!(offer(&memory, &[], 16), Taken::Malformed(16)), "a head out of the table");
}

#[test]
fn a_ring_that_claims_too_much_is_broken() {
    let memory = memory();
    let vq = MockSplitQueue::new(&memory, 16);
    let mut queue: Queue = vq.create_queue().expect("a valid queue");
    assert!(matches!(take(&mut queue, &memory, DESCRIPTORS_MAX), Taken::Empty));
    vq.avail().idx().store(17);
    assert!(matches!(take(&mut queue, &memory, DESCRIPTORS_MAX), Taken::Broken));
    assert!(matches!(take(&mut queue, &AddressSpace::default(), DESCRIPTORS_MAX), Taken::Broken));
}

proptest! {
    #[test]
    fn no_table_makes_trouble(
        table in prop::collection::vec((0u64..0x21000, any::<u32>(), any::<u16>(), 0u16..18), 16),
        head in 0u16..20,
    ) {
        let memory = memory();
        let descriptors: Vec<_> =
            table.iter()
                .map(|&(addr, len, flags, next)| desc(addr, len % 0x2000, flags & 7, next))
                .collect();
        if let Taken::Chain(chain) = offer(&memory, &descriptors, head) {
            let response = vec![1; chain.room()];
            prop_assert_eq!(chain.respond(&memory, &response) as usize, response.len());
        }
    }
}
