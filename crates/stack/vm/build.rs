//! Makes the agent of guests (`src/guest/agent`): a program without libraries, whatever the daemon itself is linked
//! with. The compiler is called directly, because its options are another program's than this crate's.

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=src/guest/agent");
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let out = Path::new(&variable("OUT_DIR")).join("agent");
    let mut command = Command::new(variable("RUSTC"));
    command.args(["src/guest/agent/main.rs", "--crate-name", "tapio_agent", "--edition", "2024"]);
    command.args(["--crate-type", "bin", "--target", &variable("TARGET"), "-o"]).arg(&out);
    command.args(["-C", "opt-level=s", "-C", "panic=abort", "-C", "lto=fat", "-C", "strip=symbols"]);
    command.args(["-C", "target-feature=+crt-static", "-C", "relocation-model=static"]);
    for argument in ["-nostartfiles", "-nostdlib", "-static", "-Wl,--build-id=none"] {
        command.args(["-C", &format!("link-arg={argument}")]);
    }
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        command.args(["-C", &format!("linker={linker}")]);
    }
    match command.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            println!("cargo:warning=the agent of guests cannot be built: the compiler ended with {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("cargo:warning=the agent of guests cannot be built: {error}");
            ExitCode::FAILURE
        }
    }
}
