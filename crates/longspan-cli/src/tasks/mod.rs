//! What a run can learn.
//!
//! [`Task`] says what a task is; [`pairs`], [`text`], [`labelled`], [`series`], [`forecast`] and [`synthetic`] are those there are. A task is built from [`tokens`]
//! and [`tokenizer_file`], [`split`], [`batches`], [`feed`], [`lines`], [`table`], [`attention`], [`stack`], [`memory`], [`workers`] and
//! [`scores`], which know nothing of tasks; what [`labelled`] and [`series`] tell is in [`labels`], which may correct what a method of [`simple`] tells; [`forecast`] has its files from
//! [`series`]. [`Trained`] is a run that has been
//! read back.

pub mod attention;
pub mod batches;
pub mod feed;
pub mod forecast;
pub mod labelled;
pub mod labels;
pub mod lines;
pub mod memory;
pub mod pairs;
pub mod ranks;
pub mod scores;
pub mod series;
pub mod simple;
pub mod split;
pub mod stack;
pub mod synthetic;
pub mod table;
pub mod task;
pub mod text;
pub mod tokenizer_file;
pub mod tokens;
pub mod workers;

pub use task::{Task, Trained};

/// Calls a function for the task of a configuration, with the settings of that task and more arguments.
macro_rules! for_task {
    ($config:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::tasks::for_predicting!($config, $function($($argument),*), config => $function::<$crate::tasks::text::Text>(config, $($argument),*))
    };
}
pub(crate) use for_task;

/// As [`for_task`], of a task that answers lines; `$text` is for the one that does not.
macro_rules! for_predicting {
    ($config:expr, $function:ident($($argument:expr),* $(,)?), $text:pat => $generates:expr) => {{
        use $crate::run::config::{RunConfig, compresses};
        match $config {
            RunConfig::Text($text) => $generates,
            RunConfig::Pairs(config) => $function::<$crate::tasks::pairs::Pairs>(config, $($argument),*),
            RunConfig::Labelled(config) => $function::<$crate::tasks::labelled::Labels>(config, $($argument),*),
            RunConfig::Series(config) => $function::<$crate::tasks::series::SeriesTask>(config, $($argument),*),
            RunConfig::Forecast(config) => $function::<$crate::tasks::forecast::Forecast>(config, $($argument),*),
            RunConfig::Synthetic(config) if compresses(&config.task.synthetic) => {
                $function::<$crate::tasks::synthetic::Compressing>(config, $($argument),*)
            }
            RunConfig::Synthetic(config) => $function::<$crate::tasks::synthetic::Telling>(config, $($argument),*),
        }
    }};
}
pub(crate) use for_predicting;
