//! Compiles the API definition. `protox` parses it in Rust, so that a build needs no `protoc` on
//! the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const FILE: &str = "proto/vhost_rdma/v1/admin.proto";
    println!("cargo::rerun-if-changed={FILE}");
    let set = protox::compile([FILE], ["proto"])?;
    tonic_prost_build::configure().compile_fds(set)?;
    Ok(())
}
