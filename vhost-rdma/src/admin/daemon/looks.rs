//! How NICs are now. Networks are asked side by side: those that do not answer take their second
//! together, and whoever asks is not to believe that the daemon is gone.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use super::{Daemon, NicView};
use crate::node::{Backend, NicConfig};

/// Networks that are asked at once.
const SIDE_BY_SIDE: usize = 16;

/// A NIC, and why it could not be served when the daemon started.
pub(super) type Known = (NicConfig, Option<String>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Daemon<B> {
    /// All these NICs, in this order.
    pub(super) fn views(&self, nics: Vec<Known>) -> Vec<NicView> {
        let mut networks: BTreeMap<String, Vec<(usize, Known)>> = BTreeMap::new();
        for (n, (nic, broken)) in nics.into_iter().enumerate() {
            networks.entry(nic.network.clone()).or_default().push((n, (nic, broken)));
        }
        let threads = SIDE_BY_SIDE.min(networks.len());
        let networks = Mutex::new(networks.into_values());
        let views = Mutex::new(BTreeMap::new());
        let look = || {
            let next = || lock(&networks).next();
            while let Some(nics) = next() {
                for (n, (nic, broken)) in nics {
                    let view = self.view(nic, broken);
                    lock(&views).insert(n, view);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // Without the thread it takes longer.
                let _ = Builder::new().name("look".to_owned()).spawn_scoped(scope, look);
            }
            look();
        });
        views.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config;
    use crate::node::{AttachError, NicStatus, NullBackend};

    const SECOND: Duration = Duration::from_millis(300);

    /// No network of it answers.
    #[derive(Debug, Default)]
    struct Silent(NullBackend);

    impl Backend for Silent {
        fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
            self.0.attach(nic)
        }

        fn detach(&self, name: &str) {
            self.0.detach(name);
        }

        fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
            self.0.update(nic)
        }

        fn status(&self, name: &str) -> NicStatus {
            std::thread::sleep(SECOND);
            self.0.status(name)
        }
    }

    #[test]
    fn networks_that_do_not_answer_take_their_time_together() {
        let network =
            |n: usize| format!("[[networks]]\nname='n{n}'\n[[nics]]\nname='{n}'\nnetwork='n{n}'\n");
        let file: String = (0..12).map(network).collect();
        let file: config::File = toml::from_str(&file).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(dir.path(), false, &file, Silent::default()).unwrap();
        let begin = Instant::now();
        let views = daemon.nics(None).unwrap();
        assert!(begin.elapsed() < SECOND * 6, "{:?}", begin.elapsed());
        let names: Vec<&str> = views.iter().map(|view| view.config.name.as_str()).collect();
        assert_eq!(names.len(), 12);
        assert!(names.is_sorted(), "{names:?}");
    }
}
