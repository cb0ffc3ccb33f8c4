//! The loss curve as a picture.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// A point of a curve: step and loss.
pub type Point = (f64, f64);

const TRAINING: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const DEVELOPMENT: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);
const TEXT: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// Draws the loss of every training batch (faint), its running mean, and the loss on development examples.
///
/// The picture is an SVG whose letters are text, not outlines: it needs no font where it is drawn.
pub fn loss_curve(training: &[Point], development: &[Point], title: &str) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, training, development, title).map_err(|error| anyhow!("cannot draw the loss curve: {error}"))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    training: &[Point],
    development: &[Point],
    title: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let finite = |points: &[Point]| points.iter().copied().filter(|p| p.1.is_finite()).collect::<Vec<Point>>();
    let (training, development) = (finite(training), finite(development));
    let last = training.iter().chain(&development).map(|p| p.0).fold(1.0, f64::max);
    let top = training.iter().chain(&development).map(|p| p.1).fold(0.0, f64::max);
    let top = if top > 0.0 { top * 1.05 } else { 1.0 };

    let root = SVGBackend::with_string(svg, (960, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: i32| ("sans-serif", size).into_font().color(&TEXT);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, font(22))
        .margin(18)
        .x_label_area_size(52)
        .y_label_area_size(68)
        .build_cartesian_2d(0.0..last, 0.0..top)?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(TEXT.mix(0.6))
        .x_desc("step")
        .y_desc("loss (nats per token)")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.1}"))
        .axis_desc_style(font(17))
        .label_style(font(15))
        .draw()?;
    chart.draw_series(LineSeries::new(training.iter().copied(), TRAINING.mix(0.25)))?;
    let mean = running_mean(&training);
    let legend = |colour: RGBColor| move |(x, y)| PathElement::new(vec![(x, y), (x + 24, y)], colour.stroke_width(3));
    chart
        .draw_series(LineSeries::new(mean, TRAINING.stroke_width(2)))?
        .label("training batches, running mean")
        .legend(legend(TRAINING));
    if !development.is_empty() {
        chart
            .draw_series(LineSeries::new(development, DEVELOPMENT.stroke_width(2)).point_size(3))?
            .label("development examples")
            .legend(legend(DEVELOPMENT));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(GRID)
        .label_font(font(15))
        .legend_area_size(34)
        .margin(14)
        .draw()?;
    root.present()?;
    Ok(())
}

/// An exponential mean over about a hundredth of the curve, without the pull of its start towards 0.
fn running_mean(points: &[Point]) -> Vec<Point> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 100.0).max(1.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|&(step, loss)| {
            sum = keep * sum + loss;
            weight = keep * weight + 1.0;
            (step, sum / weight)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_has_axes_and_a_legend() {
        let training: Vec<Point> = (0..300).map(|i| (i as f64, 3.0 / (1.0 + i as f64 / 30.0))).collect();
        let development = [(100.0, 1.0), (200.0, 0.6), (299.0, f64::NAN)];
        let svg = loss_curve(&training, &development, "a title").unwrap();
        for part in ["a title", "step", "loss (nats per token)", "development examples", "running mean"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn no_points_and_one_point_are_drawn_too() {
        assert!(loss_curve(&[], &[], "t").unwrap().contains("</svg>"));
        assert!(loss_curve(&[(0.0, 2.0)], &[], "t").unwrap().contains("</svg>"));
    }

    #[test]
    fn the_mean_of_a_constant_is_that_constant() {
        let points: Vec<Point> = (0..500).map(|i| (i as f64, 2.0)).collect();
        assert!(running_mean(&points).iter().all(|p| (p.1 - 2.0).abs() < 1e-12));
    }
}
