//! The shared heap of programs with NICs for processes (`process/heap`), as a program meets it that
//! has it preloaded: `tests/guest-programs/process-heap.c`, which needs no device.

// clippy.toml allows this in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

fn compile(args: &[&str], sources: &[PathBuf], output: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]).args(args);
    let status = command.arg("-o").arg(output).args(sources).args(["-lpthread", "-ldl"]).status();
    assert!(status.unwrap().success(), "{command:?}");
}

/// The library and the program, made once.
fn made() -> &'static (PathBuf, PathBuf) {
    static MADE: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    MADE.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let (library, program) = (place.join("libvhost_rdma_heap.so"), place.join("process-heap"));
        let sources = ["heap.c", "pages.c"].map(|name| here.join("process/heap").join(name));
        // As build.sh does.
        let shared = ["-fPIC", "-shared", "-fvisibility=hidden", "-fno-builtin"];
        compile(&shared, &sources, &library);
        let source = here.join("../tests/guest-programs/process-heap.c");
        compile(&[], &[source], &program);
        (library, program)
    })
}

fn case(name: &str) {
    let (library, program) = made();
    let mut command = Command::new(program);
    command.arg(name).env("LD_PRELOAD", library).env_remove("VHOST_RDMA_SHARED_HEAP");
    let said = command.output().unwrap();
    let out = String::from_utf8_lossy(&said.stdout);
    let good = said.status.success() && out == format!("ok {name}\n");
    assert!(good, "{out}{}", String::from_utf8_lossy(&said.stderr));
}

#[test]
fn half_of_the_heap_and_more_is_one_block() {
    case("large");
}

#[test]
fn what_the_heap_has_no_room_for_comes_from_the_c_library() {
    case("beyond");
    case("both-kinds");
}

#[test]
fn freed_blocks_serve_blocks_of_other_sizes() {
    case("reuse");
}

#[test]
fn freed_memory_is_given_back() {
    case("churn");
}

#[test]
fn calloc_gives_zeroes() {
    case("zeroes");
}

#[test]
fn alignments_are_kept() {
    case("aligned");
}

#[test]
fn threads_free_each_others_blocks() {
    case("threads");
}

#[test]
fn a_child_has_a_copy_of_what_is_in_use_and_of_nothing_else() {
    case("forks");
    case("forks-beside-threads");
    case("forks-without-a-file");
}

#[test]
fn a_descriptor_that_is_anothers_by_now_is_left_alone() {
    case("closed");
}

#[test]
fn where_the_heap_is_not_to_be_malloc_is_what_it_was() {
    case("off");
    case("limits");
}
