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
pub mod trained;
pub mod workers;

pub use task::Task;
pub use trained::Trained;

/// Calls a function for the task of a configuration. Another task is another arm, chosen by the setting that names its data.
macro_rules! for_task {
    ($config:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $config {
            config if !config.text.is_empty() => $function::<$crate::tasks::text::Text>($($argument),*),
            config if config.compresses() => {
                $function::<$crate::tasks::synthetic::Compressing>($($argument),*)
            }
            config if config.synthetic.is_some() => {
                $function::<$crate::tasks::synthetic::Telling>($($argument),*)
            }
            config if config.series.is_some() && config.forecast.is_some() => {
                $function::<$crate::tasks::forecast::Forecast>($($argument),*)
            }
            config if config.series.is_some() => $function::<$crate::tasks::series::SeriesTask>($($argument),*),
            config if config.labelled.is_some() => $function::<$crate::tasks::labelled::Labels>($($argument),*),
            _ => $function::<$crate::tasks::pairs::Pairs>($($argument),*),
        }
    };
}
pub(crate) use for_task;
