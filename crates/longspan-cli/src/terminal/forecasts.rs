//! Forecasts as a picture: what was known, the median, the intervals that hold half and four of five, and what was right.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::plot::{DEVELOPMENT, GRID, Picture, Point, TEXT, TRAINING, legend};
use super::samples::visible;

#[derive(Clone)]
pub struct Drawing {
    pub title: String,
    /// What was known, NaN where a value is missing.
    pub history: Vec<Point>,
    /// The quantiles 0.1, 0.25, 0.5, 0.75 and 0.9 at each time.
    pub quantiles: [Vec<Point>; 5],
    /// What was right, where that is known.
    pub truth: Vec<Point>,
    /// How times are written, where they are dates.
    pub dates: Option<Written>,
}

/// An axis with marks of its own.
struct Times(Range<f64>, Vec<f64>);

impl Ranged for Times {
    type ValueType = f64;
    type FormatOption = DefaultFormatting;

    fn range(&self) -> Range<f64> {
        self.0.clone()
    }

    fn map(&self, time: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range()).map(time, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.1.clone()
    }
}

/// A time, and how it is written.
type Mark = (f64, String);

pub type Written = Arc<dyn Fn(f64) -> String + Send + Sync>;

#[derive(Clone)]
pub struct Forecasts(pub Vec<Drawing>);

const PANELS: usize = 6;

impl Picture for Forecasts {
    const SIZE: (u32, u32) = (1200, 840);

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, area: &DrawingArea<B, Shift>) -> Result<()> {
        area.fill(&WHITE)?;
        let count = self.0.len().clamp(1, PANELS);
        let columns = if count > 1 { 2 } else { 1 };
        let panels = area.split_evenly((count.div_ceil(columns), columns));
        for (n, (panel, one)) in panels.iter().zip(&self.0).enumerate() {
            one.draw(panel, n == 0)?;
        }
        Ok(area.present()?)
    }
}

impl Drawing {
    fn draw<B: DrawingBackend<ErrorType: 'static>>(
        &self,
        area: &DrawingArea<B, Shift>,
        with_legend: bool,
    ) -> Result<()> {
        let finite = |points: &[Point]| {
            points.iter().copied().filter(|p| p.0.is_finite() && p.1.is_finite()).collect::<Vec<Point>>()
        };
        let (history, truth) = (finite(&self.history), finite(&self.truth));
        let bands = self.quantiles.each_ref().map(|points| finite(points));
        let all = || history.iter().chain(&truth).chain(bands.iter().flatten());
        let range = |of: fn(&Point) -> f64| {
            let (low, high) =
                all().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
            if low < high {
                (low, high)
            } else if low.is_finite() {
                (low - 1.0, low + 1.0)
            } else {
                (0.0, 1.0)
            }
        };
        let ((first, last), (low, high)) = (range(|p| p.0), range(|p| p.1));
        let margin = 0.06 * (high - low);
        let font = |size: i32| ("sans-serif", size).into_font().color(&TEXT);
        let title: String = visible(&self.title).chars().take(60).collect();
        let times = history.iter().chain(&bands[2]).map(|point| point.0);
        let marks = match &self.dates {
            Some(written) => {
                let all: Vec<Mark> = times.map(|time| (time, written(time))).collect();
                dated(&all, area.dim_in_pixel().0 - 108)
            }
            None => {
                let marks = RangedCoordf64::from(first..last).key_points(4);
                marks.into_iter().map(|time| (time, short(time, last - first))).collect()
            }
        };
        let written =
            |time: &f64| marks.iter().find(|mark| mark.0 == *time).map_or(String::new(), |mark| mark.1.clone());
        let mut chart = ChartBuilder::on(area)
            .caption(title, font(20))
            .margin(16)
            .x_label_area_size(36)
            .y_label_area_size(76)
            .build_cartesian_2d(
                Times(first..last, marks.iter().map(|mark| mark.0).collect()),
                low - margin..high + margin,
            )?;
        let digits = (2.0 - (high - low).log10().floor()).clamp(0.0, 12.0) as usize;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(TEXT.mix(0.6))
            .y_labels(6)
            .x_label_formatter(&written)
            .y_label_formatter(&|y| format!("{y:.digits$}"))
            .label_style(font(14))
            .draw()?;
        for (low, high, share, label) in [(0, 4, 0.18, "80 % interval"), (1, 3, 0.32, "50 % interval")] {
            let colour = DEVELOPMENT.mix(share).filled();
            // From the last known value on.
            let mut corners: Vec<Point> =
                history.last().copied().into_iter().chain(bands[low].iter().copied()).collect();
            corners.extend(bands[high].iter().rev());
            chart
                .draw_series(std::iter::once(Polygon::new(corners, colour)))?
                .label(label)
                .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 24, y + 6)], colour));
        }
        let median = history.last().copied().into_iter().chain(bands[2].iter().copied());
        chart
            .draw_series(LineSeries::new(median, DEVELOPMENT.stroke_width(2)))?
            .label("median")
            .legend(legend(DEVELOPMENT));
        chart
            .draw_series(LineSeries::new(history.iter().copied(), TRAINING.stroke_width(2)))?
            .label("known")
            .legend(legend(TRAINING));
        if !truth.is_empty() {
            let points = truth.iter().map(|point| Circle::new(*point, 3, TEXT.filled()));
            chart.draw_series(points)?.label("held out").legend(|(x, y)| Circle::new((x + 12, y), 3, TEXT.filled()));
        }
        if with_legend {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .background_style(WHITE.mix(0.85))
                .border_style(GRID)
                .label_font(font(14))
                .legend_area_size(30)
                .margin(8)
                .draw()?;
        }
        Ok(())
    }
}

/// The dates that stand below a picture of so many pixels, some of those where a year, a month or a day begins, which changes more of a date
/// than what follows, or else of all.
fn dated(all: &[Mark], pixels: u32) -> Vec<Mark> {
    let width = 8 * all.iter().map(|mark| mark.1.chars().count()).max().unwrap_or(0) + 16;
    let span = all.last().zip(all.first()).map_or(0.0, |(last, first)| last.0 - first.0);
    let apart = span * width as f64 / f64::from(pixels);
    let alike = |pair: &[Mark]| pair[0].1.bytes().zip(pair[1].1.bytes()).take_while(|(a, b)| a == b).count();
    let kept: Vec<usize> = std::iter::once(width).chain(all.windows(2).map(alike)).collect();
    let fits = |some: &Vec<&Mark>| some.windows(2).all(|pair| pair[1].0 - pair[0].0 >= apart);
    let beginning = |most: usize| -> Vec<&Mark> {
        let all: Vec<&Mark> = all.iter().zip(&kept).filter(|(_, kept)| **kept <= most).map(|(mark, _)| mark).collect();
        (1..=all.len()).map(|step| all.iter().step_by(step).copied().collect()).find(fits).unwrap_or_default()
    };
    let found = (0..width).map(beginning).find(|some| some.len() > 1).unwrap_or_else(|| beginning(width));
    found.into_iter().cloned().collect()
}

/// A time with the digits that it has beside the span of the picture.
fn short(time: f64, span: f64) -> String {
    let digits = (2.0 - span.log10().floor()).clamp(0.0, 12.0) as usize;
    let text = format!("{time:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_has_its_history_bands_median_and_truth() {
        let line = |level: f64| (0..5).map(|n| (10.0 + f64::from(n), level)).collect::<Vec<Point>>();
        let history: Vec<Point> =
            (0..10).map(|n| (f64::from(n), if n == 4 { f64::NAN } else { f64::from(n) })).collect();
        let quantiles = [line(1.0), line(2.0), line(3.0), line(4.0), line(5.0)];
        let one = Drawing { title: "a: <sales>".into(), history, quantiles, truth: line(3.5), dates: None };
        for count in [1, 2, 9] {
            let svg = Forecasts(vec![one.clone(); count]).svg().unwrap();
            for part in ["a: &lt;sales&gt;", "80 % interval", "50 % interval", "median", "known", "held out"] {
                assert!(svg.contains(part), "{part}");
            }
            assert!(!svg.contains("NaN"));
            assert_eq!(svg.matches("a: &lt;sales&gt;").count(), count.min(PANELS));
        }
        let nothing = Drawing { history: Vec::new(), quantiles: Default::default(), truth: Vec::new(), ..one };
        assert!(!Forecasts(vec![nothing]).png().unwrap().is_empty());
        let hours = |count: usize| -> Vec<Mark> {
            (0..count).map(|n| (n as f64, format!("2024-02-{:02} {:02}:00", 27 + n / 24, n % 24))).collect()
        };
        let at = |count, pixels| dated(&hours(count), pixels).iter().map(|mark| mark.0).collect::<Vec<f64>>();
        assert_eq!((at(60, 480), at(30, 480)), (vec![24.0, 48.0], vec![10.0, 24.0]), "days, or hours");
        assert_eq!((at(200, 480), at(60, 100), at(0, 480)), (vec![24.0, 96.0, 168.0], vec![0.0], vec![]));
        assert_eq!((short(1949.5, 20.0), short(12.0, 300.0)), ("1949.5".into(), "12".into()));
    }
}
