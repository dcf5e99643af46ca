//! libFuzzer's way into the fuzz targets: one program for all, `VHOST_RDMA_FUZZ_TARGET` names the
//! one.

#![no_main]

use std::sync::OnceLock;

use vhost_rdma::device::fuzz::TARGETS;

libfuzzer_sys::fuzz_target!(|doing: &[u8]| {
    static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let wanted = std::env::var("VHOST_RDMA_FUZZ_TARGET").expect("the name of a target");
        let found = TARGETS.iter().find(|(name, _)| *name == wanted);
        found.unwrap_or_else(|| panic!("no target is called {wanted:?}")).1
    });
    target(doing);
});
