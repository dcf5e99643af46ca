//! Compiles the kubelet's interface definitions. `protox` parses them in Rust, so that a build
//! needs no `protoc` on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    for file in ["deviceplugin/v1beta1/api.proto", "podresources/v1/api.proto"] {
        let set = protox::compile([format!("proto/{file}")], ["proto"])?;
        tonic_prost_build::configure().compile_fds(set)?;
    }
    // For the example `cri-pod`, which is on the other side of a runtime's socket.
    let set = protox::compile(["proto/cri/v1/api.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(set)?;
    Ok(())
}
