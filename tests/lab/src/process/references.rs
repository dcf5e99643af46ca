//! What the machine does without a device, for `process bench` to hold the programs against.
//!
//! Those of several copies tell what memory costs at least that a process keeps to itself: only the
//! process reaches it, so bytes come and go through memory that it shares with the device. Where a
//! peer writes, the program may have unmapped its memory, so the last copy is the kernel's.

use std::fs::File;
use std::hint::{black_box, spin_loop};
use std::io::{IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvError, TryRecvError, sync_channel};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

const SIZE: usize = 64 << 10;
pub(super) const MIB: f64 = (1 << 20) as f64;

/// 64 KiB at the beginning of a page, as the programs' buffers are. Copies between buffers of other
/// places can take sixteen times as long (vhost-rdma/memory/src/copy.rs).
struct Buffer(Vec<u8>);

impl Buffer {
    const PAGE: usize = 4096;

    fn new(byte: u8) -> Self {
        Self(vec![byte; SIZE + Self::PAGE])
    }

    fn start(&self) -> usize {
        self.0.as_ptr().align_offset(Self::PAGE)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[self.start()..][..SIZE]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut self.0[start..][..SIZE]
    }
}

/// MiB a second of one thread that copies 64 KiB again and again.
pub(super) fn copies() -> f64 {
    const TIMES: usize = 40_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let begin = Instant::now();
    for _ in 0..TIMES {
        black_box(&mut to).copy_from_slice(black_box(&from));
    }
    (TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64()
}

/// MiB a second of one thread that has the kernel copy 64 KiB of a process's memory again and
/// again: the least that memory which is not shared takes, and what a process of another's
/// privilege may not ask.
pub(super) fn copies_by_the_kernel() -> Result<f64> {
    const TIMES: usize = 10_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let remote = [RemoteIoVec { base: black_box(&from).as_ptr() as usize, len: SIZE }];
    let begin = Instant::now();
    for _ in 0..TIMES {
        let local = &mut [IoSliceMut::new(&mut to)];
        let copied = process_vm_readv(Pid::this(), local, &remote).context("process_vm_readv")?;
        ensure!(copied == SIZE, "process_vm_readv copied {copied} bytes");
    }
    ensure!(*to == *from, "process_vm_readv copied something else");
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// The same by a descriptor of the process's memory, which it could hand over.
pub(super) fn copies_of_own_memory() -> Result<f64> {
    const TIMES: usize = 10_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let memory = File::open("/proc/self/mem").context("/proc/self/mem")?;
    let at = black_box(&from).as_ptr() as u64;
    let begin = Instant::now();
    for _ in 0..TIMES {
        memory.read_exact_at(black_box(&mut to), at).context("/proc/self/mem")?;
    }
    ensure!(*to == *from, "/proc/self/mem has something else");
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// Has the kernel copy a buffer to another of this process.
fn copy_by_the_kernel(from: &Buffer, to: &mut Buffer) -> Result<()> {
    let remote = [RemoteIoVec { base: to.as_mut_ptr() as usize, len: SIZE }];
    let copied = process_vm_writev(Pid::this(), &[IoSlice::new(from)], &remote);
    ensure!(copied.context("process_vm_writev")? == SIZE, "process_vm_writev copied less");
    Ok(())
}

/// MiB a second of one thread that copies each 64 KiB three times, from buffer to buffer: what a
/// send takes at least between programs' own memories if all of it is on one core.
pub(super) fn copies_thrice() -> f64 {
    const TIMES: usize = 10_000;
    let (from, mut to) = (Buffer::new(1), [0; 3].map(Buffer::new));
    let begin = Instant::now();
    for _ in 0..TIMES {
        let [first, second, third] = black_box(&mut to);
        first.copy_from_slice(black_box(&from));
        second.copy_from_slice(black_box(first));
        third.copy_from_slice(black_box(second));
    }
    (TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64()
}

/// MiB a second of one thread that copies each 64 KiB twice, the second time by the kernel: what a
/// write takes at least between programs' own memories if all of it is on one core.
pub(super) fn copies_twice() -> Result<f64> {
    const TIMES: usize = 10_000;
    let (from, mut shared, mut to) = (Buffer::new(1), Buffer::new(0), Buffer::new(0));
    let begin = Instant::now();
    for _ in 0..TIMES {
        black_box(&mut shared).copy_from_slice(black_box(&from));
        copy_by_the_kernel(&shared, &mut to)?;
    }
    ensure!(*to == *from, "the kernel copied something else");
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// The same by two threads that never sleep, the second of which has the kernel copy: a core for
/// each process, where nobody but the two has anything to do.
pub(super) fn pair() -> Result<f64> {
    const TIMES: usize = 10_000;
    const ROOM: usize = 8;
    let ((out, came), (back, spare)) = (sync_channel(ROOM), sync_channel(ROOM));
    for _ in 0..ROOM {
        back.send(Buffer::new(0))?;
    }
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            (0..TIMES).try_for_each(|_| {
                let mut piece = poll(&spare)?;
                piece.copy_from_slice(&from);
                out.send(piece).ok()
            })
        });
        for _ in 0..TIMES {
            let piece = poll(&came).context("the first thread has ended")?;
            copy_by_the_kernel(&piece, &mut to)?;
            // The first thread may have ended.
            let _unwanted = back.send(piece);
        }
        anyhow::Ok(())
    })?;
    black_box(&to);
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// The next buffer, by a thread that never sleeps.
fn poll(from: &Receiver<Buffer>) -> Option<Buffer> {
    loop {
        match from.try_recv() {
            Ok(buffer) => return Some(buffer),
            Err(TryRecvError::Empty) => spin_loop(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
}

/// MiB a second that go through three threads, each of which copies what it got: what private
/// memory of two processes takes, without anything that takes care of it.
pub(super) fn relay() -> Result<f64> {
    const TIMES: usize = 20_000;
    const ROOM: usize = 4;
    let full = || sync_channel::<Buffer>(ROOM);
    let (first, second, spare_first, spare_second) = (full(), full(), full(), full());
    for _ in 0..ROOM {
        spare_first.0.send(Buffer::new(0))?;
        spare_second.0.send(Buffer::new(0))?;
    }
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let (out, spare) = (first.0, spare_first.1);
        scope.spawn(move || {
            (0..TIMES).try_for_each(|_| {
                let mut piece = spare.recv().ok()?;
                piece.copy_from_slice(&from);
                out.send(piece).ok()
            })
        });
        let (came, back, out, spare) = (first.1, spare_first.0, second.0, spare_second.1);
        scope.spawn(move || {
            (0..TIMES).try_for_each(|_| {
                let (piece, mut next) = (came.recv().ok()?, spare.recv().ok()?);
                next.copy_from_slice(&piece);
                // The first thread may have ended.
                let _unwanted = back.send(piece);
                out.send(next).ok()
            })
        });
        for _ in 0..TIMES {
            let piece = second.1.recv()?;
            to.copy_from_slice(&piece);
            let _unwanted = spare_second.0.send(piece);
        }
        Ok::<_, RecvError>(())
    })?;
    black_box(&to);
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// Microseconds that a word takes from one spinning thread to another: half of what it takes there
/// and back.
pub(super) fn hand_off() -> f64 {
    const TIMES: u32 = 200_000;
    let (ping, pong) = (AtomicU32::new(0), AtomicU32::new(0));
    let await_word = |word: &AtomicU32, value: u32| {
        while word.load(Ordering::Acquire) != value {
            spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1..=TIMES {
                await_word(&ping, turn);
                pong.store(turn, Ordering::Release);
            }
        });
        let begin = Instant::now();
        for turn in 1..=TIMES {
            ping.store(turn, Ordering::Release);
            await_word(&pong, turn);
        }
        begin.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES) / 2.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_have_figures() {
        assert!([copies(), copies_thrice(), hand_off()].iter().all(|speed| *speed > 0.0));
        let others = [copies_by_the_kernel, copies_of_own_memory, copies_twice, pair, relay];
        assert!(others.iter().all(|measure| measure().is_ok_and(|speed| speed > 0.0)));
    }
}
