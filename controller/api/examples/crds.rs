//! Writes the definitions of all kinds: `cargo xtask crds` calls it with `manifests/crds`.

use std::path::Path;
use std::process::ExitCode;

fn write(dir: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for (name, text) in vhost_rdma_cluster_api::crd::files()? {
        let path = dir.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("usage: crds DIR");
        return ExitCode::from(2);
    };
    match write(Path::new(&dir)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write the definitions: {error}");
            ExitCode::FAILURE
        }
    }
}
