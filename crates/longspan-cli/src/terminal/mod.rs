//! What a person sees: notes, a progress bar, samples, plots; and what a person asks: signals.

pub mod forecasts;
pub mod notes;
pub mod plot;
pub mod progress;
pub mod samples;
pub mod shell;
pub mod signals;
