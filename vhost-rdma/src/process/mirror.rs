//! The jobs of a process that has mirrored regions (docs/virtio-rdma-process.md §4): their way to
//! it, and the way of its answers back.
//!
//! The process has the other end of a channel of its own, and may fill it, leave it unread or close
//! it: whatever it does costs its own session. An answer counts once, and for a job that was asked.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsFd as _;

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags};
use virtio_rdma_abi::{MrRegReq, access};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::messages::{MirrorDone, MirrorJob};
use super::socket::{self, Channel};
use crate::nic::Job;

/// Jobs of one packet, at most.
const PACK: usize = 8;
/// Packets of answers that are taken in one go.
const BATCH: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Mirrors {
    pub(super) channel: Channel,
    /// Jobs that there was no room for.
    waiting: VecDeque<Job>,
    /// Numbers of jobs whose answers are awaited.
    asked: BTreeSet<u64>,
    /// The process has asked for a mirrored region.
    used: bool,
}

/// Why there are no answers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// The process has closed the channel, or it never arrived: where the table of descriptors is
    /// full, the kernel drops those that come with a message (unix(7), `MSG_CTRUNC`).
    Closed,
    /// It broke the rules.
    Broken,
}

/// Whether MR_REG, of which these bytes are the body, asks for a mirrored region.
pub(super) fn is_mirrored(body: &[u8]) -> bool {
    MrRegReq::read_from_prefix(body)
        .is_ok_and(|(region, _)| region.access.get() & access::MIRRORED != 0)
}

impl Mirrors {
    pub(super) fn new() -> io::Result<Self> {
        let (waiting, asked) = (VecDeque::new(), BTreeSet::new());
        Ok(Self { channel: Channel::new()?, waiting, asked, used: false })
    }

    /// There may be mirrored regions from now on.
    pub(super) const fn use_them(&mut self) {
        self.used = true;
    }

    /// Whether there may be any.
    pub(super) const fn are_used(&self) -> bool {
        self.used
    }

    /// What is waited for.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let room = if self.waiting.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        PollFd::new(&self.channel, PollFlags::IN | room)
    }

    /// Gives jobs to the process, as far as its channel has room.
    pub(super) fn give(&mut self, jobs: Vec<Job>) {
        self.waiting.extend(jobs);
        while !self.waiting.is_empty() {
            let count = self.waiting.len().min(PACK);
            let packet: ArrayVec<MirrorJob, PACK> =
                self.waiting.iter().take(count).map(MirrorJob::from).collect();
            if !self.channel.put(packet.as_slice().as_bytes()) {
                return;
            }
            self.asked.extend(self.waiting.drain(..count).map(|job| job.number));
        }
    }

    /// The process's answers: numbers of jobs, and the values; `None`: it could not.
    pub(super) fn take(&mut self) -> Result<Vec<(u64, Option<u64>)>, NoAnswer> {
        let mut done = Vec::new();
        for _ in 0..BATCH {
            let packet = match socket::receive(self.channel.as_fd()) {
                Ok(Some(packet)) if !packet.cut => packet,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) => return Err(NoAnswer::Closed),
                Ok(_) | Err(_) => return Err(NoAnswer::Broken),
            };
            let answers = <[MirrorDone]>::ref_from_bytes(packet.bytes());
            let answers = answers.map_err(|_| NoAnswer::Broken)?;
            for answer in answers {
                let number = answer.number.get();
                if answer.reserved.get() != 0 || !self.asked.remove(&number) {
                    return Err(NoAnswer::Broken);
                }
                done.push((number, (answer.status.get() == 0).then_some(answer.value.get())));
            }
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::nic::JobKind;

    fn job(number: u64) -> Job {
        Job { number, kind: JobKind::Wanted, key: 7, address: 0x1000, length: 8, operands: [0; 2] }
    }

    fn answer(number: u64, status: u32) -> MirrorDone {
        let (number, status) = (number.into(), status.into());
        MirrorDone { number, status, reserved: 0.into(), value: 5.into() }
    }

    fn begun() -> (Mirrors, OwnedFd) {
        let mirrors = Mirrors::new().unwrap();
        let [theirs, _] = mirrors.channel.ends().unwrap();
        let theirs = theirs.try_clone_to_owned().unwrap();
        (mirrors, theirs)
    }

    fn say(process: &OwnedFd, answer: &MirrorDone) {
        socket::send(process.as_fd(), answer.as_bytes(), &[]).unwrap();
    }

    #[test]
    fn jobs_go_and_answers_come() {
        let (mut mirrors, process) = begun();
        mirrors.give(vec![job(1), job(2)]);
        let packet = socket::receive(process.as_fd()).unwrap().unwrap();
        let seen = <[MirrorJob]>::ref_from_bytes(packet.bytes()).unwrap();
        let numbers: Vec<u64> = seen.iter().map(|job| job.number.get()).collect();
        assert_eq!((numbers, seen[0].kind.get(), seen[0].key.get()), (vec![1, 2], 2, 7));
        say(&process, &answer(2, 14));
        say(&process, &answer(1, 0));
        assert_eq!(mirrors.take().unwrap(), [(2, None), (1, Some(5))]);
        assert!(mirrors.take().unwrap().is_empty());
        mirrors.give(vec![job(3), job(4)]);
        let both = [answer(3, 0), answer(4, 0)];
        socket::send(process.as_fd(), both.as_bytes(), &[]).unwrap();
        assert_eq!(mirrors.take().unwrap(), [(3, Some(5)), (4, Some(5))]);
    }

    #[test]
    fn an_answer_counts_once_and_for_what_was_asked() {
        for wrong in [answer(9, 0), MirrorDone { reserved: 1.into(), ..answer(1, 0) }] {
            let (mut mirrors, process) = begun();
            mirrors.give(vec![job(1)]);
            say(&process, &wrong);
            assert!(mirrors.take().is_err(), "{wrong:?}");
        }
        let (mut mirrors, process) = begun();
        mirrors.give(vec![job(1)]);
        say(&process, &answer(1, 0));
        say(&process, &answer(1, 0));
        assert!(mirrors.take().is_err());
    }

    #[test]
    fn a_channel_that_is_gone_is_no_broken_rule() {
        let (mut mirrors, process) = begun();
        drop((process, mirrors.channel.given()));
        assert_eq!(mirrors.take().unwrap_err(), NoAnswer::Closed);
        let (mut mirrors, process) = begun();
        socket::send(process.as_fd(), &[0; 23], &[]).unwrap();
        assert_eq!(mirrors.take().unwrap_err(), NoAnswer::Broken);
    }

    #[test]
    fn who_does_not_read_loses_nothing() {
        let (mut mirrors, process) = begun();
        mirrors.give((1..=4000).map(job).collect());
        assert!(!mirrors.waiting.is_empty(), "the channel takes everything");
        let mut seen = 0;
        while seen < 4000 {
            while let Ok(Some(packet)) = socket::receive(process.as_fd()) {
                for job in <[MirrorJob]>::ref_from_bytes(packet.bytes()).unwrap() {
                    seen += 1;
                    assert_eq!(job.number.get(), seen);
                }
            }
            mirrors.give(Vec::new());
        }
    }
}
