//! The driver: removed, loaded, unbound.

use std::time::Instant;

use anyhow::Result;

use super::{GIVE_UP, Life, NICS, SHORT};

const REMOVE: &str = "rmmod virtio_rdma && test -z \"$(ls /sys/class/infiniband)\"";
pub(super) const LOAD: &str = "insmod /host/products/virtio_rdma.ko";

impl Life {
    pub(super) fn remove_driver(&mut self, n: usize) -> Result<()> {
        self.guest(n)?.must(REMOVE, SHORT).map(|_| ())
    }

    pub(super) fn reload(&mut self) -> Result<()> {
        for _ in 0..3 {
            for (n, nic) in NICS.iter().enumerate() {
                self.remove_driver(n)?;
                self.wait_empty(nic, false)?;
                self.guest(n)?.must(LOAD, SHORT)?;
            }
            self.reattach()?;
            self.both_work()?;
        }
        Ok(())
    }

    pub(super) fn remove_in_use(&mut self) -> Result<()> {
        let holders = self.hold(0, &["poll", "sleep", "busy"])?;
        let (client, server) = self.load()?;
        let start = Instant::now();
        self.remove_driver(0)?;
        self.must_flush(0, &holders, start, SHORT)?;
        self.must_end(0, client)?;
        self.wait_empty(NICS[0], false)?;
        self.end(1, server)?;
        self.guest(0)?.must(LOAD, SHORT)?;
        self.reattach()
    }

    pub(super) fn unbind(&mut self) -> Result<()> {
        let (client, server) = self.load()?;
        let dev = "d=$(basename $(ls -d /sys/bus/virtio/drivers/virtio_rdma/virtio*))";
        let out = self.guest(0)?.must(
            &format!("{dev}; echo $d; echo $d > /sys/bus/virtio/drivers/virtio_rdma/unbind"),
            GIVE_UP,
        )?;
        let dev = out.trim().to_owned();
        self.must_end(0, client)?;
        self.wait_empty(NICS[0], false)?;
        self.end(1, server)?;
        self.guest(0)?
            .must(&format!("echo {dev} > /sys/bus/virtio/drivers/virtio_rdma/bind"), SHORT)?;
        self.reattach()
    }
}
