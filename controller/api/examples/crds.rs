//! Writes the definitions of all kinds and their description: `cargo xtask crds` calls it with
//! `manifests/crds` and `docs/API.md`.

use std::path::Path;
use std::process::ExitCode;

fn write(dir: &Path, reference: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for (name, text) in vhost_rdma_cluster_api::crd::files()? {
        let path = dir.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    std::fs::write(reference, vhost_rdma_cluster_api::reference::markdown()?)
        .map_err(|e| format!("{}: {e}", reference.display()))?;
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [dir, reference] = &args[..] else {
        eprintln!("usage: crds DIR API.md");
        return ExitCode::from(2);
    };
    match write(Path::new(dir), Path::new(reference)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot write the definitions: {error}");
            ExitCode::FAILURE
        }
    }
}
