//! Compiles the definition of the peers' service, for whoever wants it. `protox` parses it in Rust,
//! so that a build needs no `protoc` on the machine.

#[cfg(feature = "peers")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const FILE: &str = "proto/vhost_rdma/cluster/v1/peers.proto";
    println!("cargo::rerun-if-changed={FILE}");
    let set = protox::compile([FILE], ["proto"])?;
    tonic_prost_build::configure().compile_fds(set)?;
    Ok(())
}

#[cfg(not(feature = "peers"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
