//! What a run can learn.
//!
//! [`Task`] says what a task is; [`pairs`] is the one there is. A task is built from [`tokens`] and [`tokenizer_file`], [`split`], [`batches`],
//! [`lines`], [`attention`], [`memory`], [`workers`] and [`scores`], which know nothing of tasks. [`Trained`] is a run that has been read back.

pub mod attention;
pub mod batches;
pub mod lines;
pub mod memory;
pub mod pairs;
pub mod scores;
pub mod split;
pub mod task;
pub mod tokenizer_file;
pub mod tokens;
pub mod trained;
pub mod workers;

pub use task::Task;
pub use trained::Trained;

/// Calls a function for the task of a configuration. Another task is another arm, chosen by the setting that names its data:
/// `config if config.text.is_some() => $function::<Text>(…)`.
macro_rules! for_task {
    ($config:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $config {
            _ => $function::<$crate::tasks::pairs::Pairs>($($argument),*),
        }
    };
}
pub(crate) use for_task;
