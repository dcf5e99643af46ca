//! The targets for a bounded time, and what their scenes are worth.

use std::panic::catch_unwind;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Seconds that each target runs, if `VHOST_RDMA_FUZZ_SECONDS` does not say otherwise.
const SECONDS: u64 = 10;
/// A string that takes longer than this has found an endless loop.
const LONG: Duration = Duration::from_secs(20);

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let files = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let read = |file: std::io::Result<std::fs::DirEntry>| {
        std::fs::read(file.expect("a file").path()).expect("readable")
    };
    let strings: Vec<_> = files.map(read).collect();
    assert!(!strings.is_empty(), "{} is empty", dir.display());
    strings
}

fn run(name: &str, target: fn(&[u8]), doing: &[u8]) {
    let begin = Instant::now();
    if catch_unwind(|| target(doing)).is_err() {
        let path = std::env::temp_dir().join(format!("vhost-rdma-fuzz-{name}"));
        std::fs::write(&path, doing).expect("room");
        panic!(
            "{name} panics; the string is in {}; put it to fuzz/corpus/{name} when it is mended",
            path.display()
        );
    }
    assert!(begin.elapsed() < LONG, "{name} took {:?}", begin.elapsed());
}

/// Changes a string as a guest would: other bytes, other lengths, pieces twice.
fn change(doing: &mut Vec<u8>, random: &mut StdRng) {
    for _ in 0..random.random_range(1..8) {
        let len = doing.len();
        let at = random.random_range(0..=len);
        match random.random_range(0..5) {
            0 => doing.truncate(at.max(8)),
            1 => {
                let more = (0..random.random_range(1..64)).map(|_| random.random::<u8>());
                doing.splice(at..at, more.collect::<Vec<_>>());
            }
            2 if len > 0 => {
                let from = random.random_range(0..len);
                let piece = doing[from..(from + 32).min(len)].to_vec();
                doing.splice(at..at, piece);
            }
            _ if len > 0 => doing[at % len] = random.random(),
            _ => doing.push(random.random()),
        }
    }
    doing.truncate(4096);
}

fn bounded(index: usize) {
    let (name, target) = TARGETS[index];
    let mut strings = corpus(name);
    strings.iter().for_each(|doing| run(name, target, doing));
    let seconds = std::env::var("VHOST_RDMA_FUZZ_SECONDS").ok();
    let seconds = seconds.map_or(SECONDS, |text| text.parse().expect("a number of seconds"));
    let any = || {
        let mut bytes = [0; 8];
        crate::random::fill(&mut bytes).expect("random numbers");
        u64::from_ne_bytes(bytes)
    };
    let seed: u64 = std::env::var("VHOST_RDMA_FUZZ_SEED")
        .map_or_else(|_| any(), |text| text.parse().expect("a number"));
    println!("{name}: VHOST_RDMA_FUZZ_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let begin = Instant::now();
    let mut count = 0u64;
    while begin.elapsed() < Duration::from_secs(seconds) {
        let mut doing = match random.random_range(0..4) {
            0 => (0..random.random_range(0..2048)).map(|_| random.random()).collect(),
            _ => strings[random.random_range(0..strings.len())].clone(),
        };
        change(&mut doing, &mut random);
        run(name, target, &doing);
        // Strings that grew out of others go on growing.
        let keep = random.random_range(0..256);
        if strings.len() < 256 && keep < 8 {
            strings.push(doing);
        } else if keep == 0 {
            let at = random.random_range(0..strings.len());
            strings[at] = doing;
        }
        count += 1;
    }
    println!("{name}: {count} strings");
    assert!(count > 0, "{name} ran nothing");
}

#[test]
fn chains_in_bounded_time() {
    bounded(0);
}

#[test]
fn commands_in_bounded_time() {
    bounded(1);
}

#[test]
fn rings_in_bounded_time() {
    bounded(2);
}

#[test]
fn saved_in_bounded_time() {
    bounded(3);
}

/// The set-up is worth something: work that makes sense is executed.
#[test]
fn the_rings_are_connected() {
    let mut machine = Machine::new().unwrap();
    let qpns = connect(&mut machine, 0x10000).unwrap();
    assert_eq!(qpns.len(), 4);
    let key = machine.said[(machine.answers - 1) % 16];
    let wqe = abi::SqWqe {
        wr_id: U64::new(7),
        opcode: abi::opcode::RDMA_WRITE,
        flags: abi::send_flags::SIGNALED,
        num_sge: U16::new(1),
        remote_addr: U64::new(0x9_0000),
        rkey: U32::new(key),
        ..Default::default()
    };
    machine.ram.write(0x10000, wqe.as_bytes());
    let sge = abi::Sge { addr: U64::new(0x9_0100), length: U32::new(64), lkey: U32::new(key) };
    machine.ram.write(0x10000 + 48, sge.as_bytes());
    machine.ram.write(0x9_0100, &[5; 64]);
    machine.ram.store_u32(DOORBELLS + db::INDEX as u64, 1);
    machine.ram.store_u8(DOORBELLS + db::SUMMARY as u64, 1);
    machine.poll(0);
    let mut moved = [0; 64];
    machine.ram.read(0x9_0000, &mut moved);
    assert_eq!(moved, [5; 64]);
}
