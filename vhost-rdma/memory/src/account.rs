//! What the daemon keeps for one NIC, in bytes of its own memory, and the most that it may be.
//!
//! Counts of objects bound what a guest can have of each kind, but objects are not alike: a queue
//! pair may be half a kilobyte or half a megabyte, and a page list as long as the guest likes. So
//! everything that is kept because a guest, or its VMM, asked for it is charged to the NIC's
//! account for what it takes, before it is made, and refused where the account is full. A
//! [`Charge`] lives in what it was taken for and is given back where that really ends, on whatever
//! thread: what waits to be dropped is still there, and still charged.
//!
//! An account is two numbers that threads share. It is looked at by commands, never on the way of a
//! message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One NIC's account. Clones are the same account.
#[derive(Clone, Debug)]
pub struct Account(Arc<Sums>);

#[derive(Debug)]
struct Sums {
    used: AtomicU64,
    most: AtomicU64,
}

impl Default for Account {
    /// Without a limit, for tests and tools.
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl Account {
    /// An account of `most` bytes.
    #[must_use]
    pub fn new(most: u64) -> Self {
        Self(Arc::new(Sums { used: AtomicU64::new(0), most: AtomicU64::new(most) }))
    }

    /// What is charged now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// The limit.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.0.most.load(Ordering::Relaxed)
    }

    /// Another limit from now on: below what is used it takes nothing away, and refuses more.
    pub fn allow(&self, most: u64) {
        self.0.most.store(most, Ordering::Relaxed);
    }

    /// Charges what is about to be made; `None` if that is too much.
    #[must_use]
    pub fn charge(&self, bytes: u64) -> Option<Charge> {
        self.take(bytes).then(|| Charge { account: self.clone(), bytes })
    }

    /// Charges what is there in any case, whatever the limit.
    #[must_use]
    pub fn hold(&self, bytes: u64) -> Charge {
        self.0.used.fetch_add(bytes, Ordering::Relaxed);
        Charge { account: self.clone(), bytes }
    }

    fn take(&self, bytes: u64) -> bool {
        let most = self.0.most.load(Ordering::Relaxed);
        let add = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= most);
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }
}

/// A part of an account, given back when it is dropped.
#[derive(Debug)]
pub struct Charge {
    account: Account,
    bytes: u64,
}

impl Charge {
    /// Becomes one of so many bytes; false if that is too much, and this one stays as it is.
    pub fn settle(&mut self, bytes: u64) -> bool {
        if let Some(more) = bytes.checked_sub(self.bytes) {
            if !self.account.take(more) {
                return false;
            }
        } else {
            self.account.0.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        }
        self.bytes = bytes;
        true
    }

    /// Becomes larger by so many bytes; false if that is too much.
    pub fn grow(&mut self, more: u64) -> bool {
        self.bytes.checked_add(more).is_some_and(|sum| self.settle(sum))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::Account;

    #[test]
    fn what_is_charged_is_refused_beyond_the_limit_and_comes_back() {
        let account = Account::new(100);
        let mut half = account.charge(50).unwrap();
        assert!(account.charge(51).is_none() && account.charge(u64::MAX).is_none());
        assert!(half.grow(50) && !half.grow(1) && !half.settle(101));
        assert_eq!(account.used(), 100);
        assert!(half.settle(10));
        let rest = account.charge(90).unwrap();
        drop(half);
        assert_eq!(account.used(), 90);
        account.allow(20);
        assert!(account.charge(1).is_none(), "lowered, it takes nothing away and gives no more");
        let always = account.hold(1000);
        assert_eq!(account.used(), 1090);
        drop((rest, always));
        assert_eq!(account.used(), 0);
    }
}
