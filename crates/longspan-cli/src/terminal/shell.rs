//! Commands that a person can paste into a shell.

use std::path::Path;

pub fn quoted(text: &str) -> String {
    // A text with a NUL cannot be an argument; then nothing is worth pasting.
    shlex::try_quote(text).unwrap_or_default().into_owned()
}

/// A path as one argument that no command takes for a flag.
pub fn path(path: &Path) -> String {
    let text = path.display().to_string();
    quoted(&if text.starts_with('-') { format!("./{text}") } else { text })
}

pub fn program() -> &'static str {
    // `cargo run` sets this for the programs it starts.
    if std::env::var_os("CARGO").is_some() { "cargo run --release --" } else { "longspan" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_quoted_where_they_must_be() {
        assert_eq!(path(Path::new("runs/one")), "runs/one");
        assert_eq!(path(Path::new("my run")), "'my run'");
        assert_eq!(path(Path::new("-run")), "./-run");
        for text in ["it's", "a\nb", "$(date) `x`", "\"", "", "-n"] {
            assert_eq!(shlex::split(&quoted(text)).unwrap(), [text]);
        }
    }
}
