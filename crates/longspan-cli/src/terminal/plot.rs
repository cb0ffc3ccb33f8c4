//! The loss curve and confusions as pictures: SVG for browsers and papers, PNG for everything else.

use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, FontTransform, register_font};

use super::samples::visible;

pub type Point = (f64, f64);

pub const TRAINING: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
pub const DEVELOPMENT: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
pub const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);
pub const TEXT: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// DejaVu Sans, reduced to Latin. A bitmap needs a font, and not every machine has one.
pub const FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-latin.ttf");

/// Points of a curve that are drawn, about: a picture has no room for more.
const POINTS: usize = 2000;

#[derive(Debug, Clone, Copy)]
pub struct LossCurve<'a> {
    /// The loss of every training batch; drawn faint, with a running mean.
    pub training: &'a [Point],
    pub development: &'a [Point],
    pub title: &'a str,
    pub measure: &'a str,
}

/// How often each label is predicted for each, of [`Matrix::MOST`] labels at most.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub labels: Vec<String>,
    /// Rows are the labels as they are, columns those that were predicted.
    pub counts: Vec<Vec<usize>>,
    /// Examples of each label, also those whose prediction has no column.
    pub totals: Vec<usize>,
    pub of: usize,
}

impl Matrix {
    /// More cells than those of so many labels could not be told apart.
    pub const MOST: usize = 60;
}

const FAILED: &str = "cannot draw the picture";

pub trait Picture {
    const SIZE: (u32, u32);

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, area: &DrawingArea<B, Shift>) -> Result<()>;

    /// As SVG, whose letters are text.
    fn svg(&self) -> Result<String> {
        register()?;
        let mut svg = String::new();
        self.draw(&SVGBackend::with_string(&mut svg, Self::SIZE).into_drawing_area()).context(FAILED)?;
        Ok(svg)
    }

    fn png(&self) -> Result<Vec<u8>> {
        register()?;
        let (width, height) = Self::SIZE;
        let mut pixels = vec![0; (width * height * 3) as usize];
        self.draw(&BitMapBackend::with_buffer(&mut pixels, Self::SIZE).into_drawing_area()).context(FAILED)?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels)).context(FAILED)?;
        Ok(file)
    }
}

fn register() -> Result<()> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    if *REGISTERED.get_or_init(|| register_font("sans-serif", FontStyle::Normal, FONT).is_ok()) {
        return Ok(());
    }
    bail!("{FAILED}: the font cannot be read")
}

impl Picture for LossCurve<'_> {
    const SIZE: (u32, u32) = (960, 560);

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, area: &DrawingArea<B, Shift>) -> Result<()> {
        let finite = |points: &[Point]| points.iter().copied().filter(|p| p.1.is_finite()).collect::<Vec<Point>>();
        let (training, development) = (finite(self.training), finite(self.development));
        let last = training.iter().chain(&development).map(|p| p.0).fold(1.0, f64::max);
        let top = training.iter().chain(&development).map(|p| p.1).fold(0.0, f64::max);
        let top = if top > 0.0 { top * 1.05 } else { 1.0 };

        area.fill(&WHITE)?;
        let font = |size: i32| ("sans-serif", size).into_font().color(&TEXT);
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, font(22))
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
            .y_desc(format!("loss ({})", self.measure))
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.1}"))
            .axis_desc_style(font(17))
            .label_style(font(15))
            .draw()?;
        chart.draw_series(LineSeries::new(thinned(&training), TRAINING.mix(0.25)))?;
        chart
            .draw_series(LineSeries::new(thinned(&running_mean(&training)), TRAINING.stroke_width(2)))?
            .label("training batches, running mean")
            .legend(legend(TRAINING));
        if !development.is_empty() {
            chart
                .draw_series(LineSeries::new(thinned(&development), DEVELOPMENT.stroke_width(2)).point_size(3))?
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
        Ok(area.present()?)
    }
}

impl Picture for Matrix {
    const SIZE: (u32, u32) = (800, 800);

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, area: &DrawingArea<B, Shift>) -> Result<()> {
        /// Where the first cell begins, and how far all of them go.
        const FROM: i32 = 130;
        const WIDE: i32 = 640;
        /// Labels of a matrix with numbers in its cells, and of one with names beside them.
        const NUMBERED: usize = 16;
        const NAMED: usize = 40;
        let count = self.labels.len();
        let edge = |n: usize| FROM + (WIDE as i64 * n as i64 / count.max(1) as i64) as i32;
        let middle = |n: usize| (edge(n) + edge(n + 1)) / 2;
        let font = |size: i32, x: HPos, y: VPos| ("sans-serif", size).into_font().color(&TEXT).pos(Pos::new(x, y));
        area.fill(&WHITE)?;
        let write = |text: String, place: (i32, i32), style: TextStyle<'_>| area.draw(&Text::new(text, place, style));
        let some = format!(": the {count} of {} labels that are confused most", self.of);
        let heading = format!("predicted{}", if count < self.of { some } else { String::new() });
        write(heading, (FROM + WIDE / 2, 22), font(20, HPos::Center, VPos::Top))?;
        let side = font(20, HPos::Center, VPos::Top).transform(FontTransform::Rotate270);
        write("true".into(), (18, FROM + WIDE / 2), side)?;
        let size = (WIDE / count.max(1) as i32 * 2 / 5).clamp(9, 18);
        for (n, (row, &all)) in self.counts.iter().zip(&self.totals).enumerate() {
            for (answer, &cell) in row.iter().enumerate() {
                let share = cell as f64 / all.max(1) as f64;
                let corners = [(edge(answer), edge(n)), (edge(answer + 1), edge(n + 1))];
                if cell > 0 {
                    area.draw(&Rectangle::new(corners, TRAINING.mix(0.9 * share).filled()))?;
                }
                if count <= NUMBERED {
                    let style = font(size, HPos::Center, VPos::Center);
                    let style = if share > 0.5 { style.color(&WHITE) } else { style };
                    write(cell.to_string(), (middle(answer), middle(n)), style)?;
                }
            }
        }
        for n in 0..=count {
            let (first, at, last) = (edge(0), edge(n), edge(count));
            for line in [vec![(first, at), (last, at)], vec![(at, first), (at, last)]] {
                area.draw(&PathElement::new(line, GRID))?;
            }
        }
        if count <= NAMED {
            for (n, label) in self.labels.iter().enumerate() {
                let name: String = visible(label).chars().take(12).collect();
                write(name.clone(), (FROM - 8, middle(n)), font(size.min(15), HPos::Right, VPos::Center))?;
                let above = font(size.min(15), HPos::Left, VPos::Center).transform(FontTransform::Rotate270);
                write(name, (middle(n), FROM - 8), above)?;
            }
        }
        Ok(area.present()?)
    }
}

pub fn legend(colour: RGBColor) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new(vec![(x, y), (x + 24, y)], colour.stroke_width(3))
}

/// At most [`POINTS`] points at even distances, and the last.
fn thinned(points: &[Point]) -> Vec<Point> {
    let step = points.len().div_ceil(POINTS).max(1);
    let last = points.last().filter(|_| !points.len().saturating_sub(1).is_multiple_of(step));
    points.iter().step_by(step).chain(last).copied().collect()
}

/// An exponential mean over about a fiftieth of the curve, at least 10 points, corrected for its start at 0.
fn running_mean(points: &[Point]) -> Vec<Point> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 50.0).max(10.0);
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
        let curve =
            LossCurve { training: &training, development: &development, title: "a title", measure: "nats per token" };
        let svg = curve.svg().unwrap();
        for part in ["a title", "step", "loss (nats per token)", "development examples", "running mean"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("NaN"));
        let png = curve.png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((frame.width, frame.height), LossCurve::SIZE);
        let has = |colour: RGBColor| pixels.chunks(3).any(|p| p == [colour.0, colour.1, colour.2]);
        assert!(has(TRAINING) && has(DEVELOPMENT) && has(TEXT), "curves and letters are there");
    }

    #[test]
    fn no_points_and_one_point_are_drawn_too() {
        for training in [&[][..], &[(0.0, 2.0)]] {
            let curve = LossCurve { training, development: &[], title: "t", measure: "nats" };
            assert!(curve.svg().unwrap().contains("</svg>"));
            curve.png().unwrap();
        }
    }

    #[test]
    fn a_long_curve_is_thinned_and_keeps_its_ends() {
        for count in [0, 1, 7, 2000, 2001, 4001, 1_000_000] {
            let points: Vec<Point> = (0..count).map(|n| (n as f64, 1.0)).collect();
            let thin = thinned(&points);
            assert!(thin.len() <= POINTS + 1 && (thin.len() == count || count > POINTS), "{count}: {}", thin.len());
            assert_eq!((thin.first(), thin.last()), (points.first(), points.last()));
            assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0), "{count}");
        }
        let long: Vec<Point> = (0..100_000).map(|n| (n as f64, 1.0)).collect();
        assert!(
            running_mean(&long).iter().all(|p| (p.1 - 1.0).abs() < 1e-12),
            "the mean of a constant is that constant"
        );
        let curve = LossCurve { training: &long, development: &[], title: "t", measure: "nats" };
        assert!(curve.svg().unwrap().len() < 200_000);
    }

    #[test]
    fn a_matrix_names_its_labels_and_counts() {
        for count in [1, 2, 16, 30, 60] {
            let labels: Vec<String> = (0..count).map(|n| format!("<label>{n}")).collect();
            let counts: Vec<Vec<usize>> =
                (0..count).map(|n| (0..count).map(|m| 7_654_321 + n * 10 + m).collect()).collect();
            let totals = counts.iter().map(|row| row.iter().sum()).collect();
            let matrix = Matrix { labels, counts, totals, of: count.max(60) };
            let svg = matrix.svg().unwrap();
            assert!(svg.contains("predicted") && svg.contains("true"));
            assert_eq!(svg.contains("of 60 labels that are confused most"), count < 60, "{count}");
            assert_eq!(svg.contains("&lt;label&gt;0"), count <= 40, "{count}");
            assert_eq!(svg.contains("7654321"), count <= 16, "{count}");
            assert!(!matrix.png().unwrap().is_empty());
        }
        Matrix { labels: Vec::new(), counts: Vec::new(), totals: Vec::new(), of: 0 }.png().unwrap();
    }
}
