//! Log-log charts: SVG for pages and papers, PNG for everything else.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::error::Error;
use crate::quantity::{bytes, time, tokens};

/// Twice the size at which a chart is shown: the drawing library knows whole pixels only.
const SIZE: (u32, u32) = (1800, 1040);
/// Room on the right for the legend.
const LEGEND: u32 = 476;

const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0x6b, 0x6b, 0x6b);
const GRID: RGBColor = RGBColor(0xe6, 0xe6, 0xe6);

/// The colours of Okabe and Ito, which people with any colour vision can tell apart, without the yellow that is too faint on
/// white; then three dark ones for more curves. The baseline is black.
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x7a, 0x4f, 0x1d),
    RGBColor(0x5b, 0x3a, 0x8c),
    RGBColor(0x8a, 0x8a, 0x8a),
];

/// How a curve looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Which colour and marker; `None` is the baseline's black.
    pub colour: Option<usize>,
    /// Dashes and hollow markers instead of a full line and full ones.
    pub dashed: bool,
}

impl Look {
    fn rgb(self) -> RGBColor {
        self.colour.map_or(BLACK, |n| COLOURS[n % COLOURS.len()])
    }

    fn stroke(self) -> ShapeStyle {
        self.rgb().stroke_width(if self.colour.is_none() { 5 } else { 4 })
    }

    /// The corners of squares, triangles and diamonds in turn around (0, 0), the first again at the end; none for a circle.
    /// Colour is not all that tells curves apart.
    fn corners(self) -> &'static [(i32, i32)] {
        match self.colour.map(|n| n % 4) {
            None | Some(0) => &[],
            Some(1) => &[(-6, -6), (6, -6), (6, 6), (-6, 6), (-6, -6)],
            Some(2) => &[(0, -10), (9, 6), (-9, 6), (0, -10)],
            Some(_) => &[(0, -9), (9, 0), (0, 9), (-9, 0), (0, -9)],
        }
    }
}

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// For the legend.
    pub label: String,
    /// `(length, quantity)`, ascending and positive.
    pub points: Vec<(f64, f64)>,
    /// How it looks.
    pub look: Look,
}

/// A length from which on a curve is below another.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Tokens, and the quantity there.
    pub at: (f64, f64),
    /// Of the curve that it belongs to.
    pub look: Look,
}

/// What the vertical axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Time,
    /// Bytes.
    Memory,
}

/// Curves over lengths, both axes logarithmic.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// For file names: lower case and hyphens.
    pub name: String,
    /// Above the plot.
    pub title: String,
    /// Below the title: sizes.
    pub subtitle: String,
    /// Of the vertical axis, without its unit.
    pub quantity: &'static str,
    /// Of the vertical axis.
    pub unit: Unit,
    /// The curves; those without points are left out.
    pub lines: Vec<Line>,
    /// Crossings.
    pub marks: Vec<Mark>,
}

/// Makes the font known that measures and draws letters. Once before the first plot; it must have Latin letters and the
/// signs `µ`, `×` and `·`.
///
/// # Errors
/// If the bytes are not an OpenType font.
pub fn use_font(font: &'static [u8]) -> Result<(), Error> {
    register_font("sans-serif", FontStyle::Normal, font)
        .map_err(|_| Error::Plot { plot: "letters".to_owned(), reason: "the font cannot be read".to_owned() })
}

fn font(size: u32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&colour)
}

/// A failure of any backend or of the encoder.
type Drawn<T> = Result<T, Box<dyn std::error::Error>>;

impl Plot {
    /// As SVG, whose letters are text.
    ///
    /// # Errors
    /// If no font was given or the drawing library fails.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        self.named(self.draw(&SVGBackend::with_string(&mut svg, SIZE).into_drawing_area()))?;
        // Only seen where a reader's system lacks the first of them.
        Ok(svg.replace("font-family=\"sans-serif\"", "font-family=\"DejaVu Sans, Verdana, sans-serif\""))
    }

    /// As PNG.
    ///
    /// # Errors
    /// As [`svg`](Self::svg).
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        self.named(self.draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area()))?;
        let encode = || {
            let mut file = Vec::new();
            let mut encoder = png::Encoder::new(&mut file, SIZE.0, SIZE.1);
            encoder.set_color(png::ColorType::Rgb);
            encoder.write_header()?.write_image_data(&pixels)?;
            Ok(file)
        };
        self.named(encode())
    }

    fn named<T>(&self, drawn: Drawn<T>) -> Result<T, Error> {
        drawn.map_err(|error| Error::Plot { plot: self.name.clone(), reason: error.to_string() })
    }

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, area: &DrawingArea<B, Shift>) -> Drawn<()> {
        // In the order of the curves' right ends, which is the order of the legend.
        let mut lines: Vec<&Line> = self.lines.iter().filter(|line| !line.points.is_empty()).collect();
        let end = |line: &Line| line.points.last().map_or(0.0, |point| point.1);
        lines.sort_by(|a, b| end(b).total_cmp(&end(a)));
        let points = || lines.iter().flat_map(|line| &line.points);
        let lengths = around(points().map(|point| point.0), 1.1, 2.0);
        let quantities = around(points().map(|point| point.1), 1.25, 4.0);

        area.fill(&WHITE)?;
        area.draw_text(&self.title, &font(34, TEXT), (148, 20))?;
        area.draw_text(&self.subtitle, &font(24, FAINT), (148, 62))?;
        let doubled = (0..40).map(|n| f64::from(n).exp2()).filter(|x| lengths.contains(x)).collect();
        // Between powers of ten a reader needs more steps where few of them show.
        let decades = (quantities.end / quantities.start).log10();
        let digits: &[f64] = if decades <= 3.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let steps = (-12..15).flat_map(|n| digits.iter().map(move |digit| digit * 10f64.powi(n)));
        let steps = steps.filter(|y| quantities.contains(y)).collect();
        let bottom = quantities.start;
        let mut chart = ChartBuilder::on(area)
            .margin_left(20)
            .margin_top(104)
            .margin_right(LEGEND)
            .margin_bottom(20)
            .x_label_area_size(96)
            .y_label_area_size(128)
            .build_cartesian_2d(
                lengths.log_scale().with_key_points(doubled),
                quantities.log_scale().with_key_points(steps),
            )?;
        chart
            .configure_mesh()
            .bold_line_style(GRID.stroke_width(2))
            .axis_style(FAINT.stroke_width(2))
            .x_desc("sequence length (tokens)")
            .y_desc(self.quantity)
            .x_label_formatter(&|length| length_label(*length))
            .y_label_formatter(&|quantity| self.unit.label(*quantity))
            .label_style(font(24, TEXT))
            .y_label_offset(5)
            .axis_desc_style(font(26, TEXT))
            .draw()?;
        let path = |points: &[(i32, i32)], style| area.draw(&PathElement::new(points.to_vec(), style));
        for mark in &self.marks {
            let down = [mark.at, (mark.at.0, bottom)].map(|at| chart.backend_coord(&at));
            dashes(&down, 8.0, 8.0).iter().try_for_each(|dash| path(dash, mark.look.rgb().stroke_width(2)))?;
        }
        let marker = |look: Look, (x, y): (i32, i32)| {
            let fill = if look.dashed { WHITE } else { look.rgb() };
            let corners: Vec<_> = look.corners().iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
            if corners.is_empty() {
                area.draw(&Circle::new((x, y), 7, fill.filled()))?;
                return area.draw(&Circle::new((x, y), 7, look.rgb().stroke_width(3)));
            }
            area.draw(&Polygon::new(corners.clone(), fill.filled()))?;
            path(&corners, look.rgb().stroke_width(3))
        };
        let stroke = |look: Look, points: &[(i32, i32)]| match look.dashed {
            true => dashes(points, 12.0, 8.0).iter().try_for_each(|dash| path(dash, look.stroke())),
            false => path(points, look.stroke()),
        };
        // The library's own legend cannot stand beside the plotting area.
        let legend = (SIZE.0 - LEGEND) as i32 + 32;
        let entry = |n: usize| 128 + 44 * n as i32;
        let name = |text: &str, n: usize, colour| {
            let style = font(24, colour).pos(Pos::new(HPos::Left, VPos::Center));
            area.draw_text(text, &style, (legend + 72, entry(n) + 4))
        };
        for (n, Line { label, points, look }) in lines.iter().enumerate() {
            let pixels: Vec<_> = points.iter().map(|point| chart.backend_coord(point)).collect();
            stroke(*look, &pixels)?;
            pixels.iter().try_for_each(|&at| marker(*look, at))?;
            stroke(*look, &[(legend, entry(n)), (legend + 56, entry(n))])?;
            marker(*look, (legend + 28, entry(n)))?;
            name(label, n, TEXT)?;
        }
        let mut marks: Vec<&Mark> = self.marks.iter().collect();
        marks.sort_by(|a, b| a.at.0.total_cmp(&b.at.0));
        // Labels stand above the axis, each on the lowest line on which the one before it has ended.
        let mut ends: Vec<i32> = Vec::new();
        for mark in &marks {
            let start = chart.backend_coord(&mark.at).0;
            let text = tokens(mark.at.0.round() as usize);
            let line = ends.iter().position(|&end| end < start).unwrap_or(ends.len());
            ends.resize(ends.len().max(line + 1), 0);
            ends[line] = start + 16 * (text.len() as i32 + 1);
            let place = (8, -36 - 30 * line as i32);
            let text = EmptyElement::at((mark.at.0, bottom)) + Text::new(text, place, font(24, mark.look.rgb()));
            chart.draw_series([text])?;
        }
        let ring = |at| area.draw(&Circle::new(at, 12, TEXT.stroke_width(2)));
        marks.iter().try_for_each(|mark| ring(chart.backend_coord(&mark.at)))?;
        if !marks.is_empty() {
            ring((legend + 28, entry(lines.len())))?;
            name("faster from here on", lines.len(), FAINT)?;
        }
        area.present()?;
        Ok(())
    }
}

/// The dashes of a path, which run on around its corners.
fn dashes(points: &[(i32, i32)], dash: f64, gap: f64) -> Vec<[(i32, i32); 2]> {
    let period = dash + gap;
    let mut found = Vec::new();
    let mut walked = 0.0;
    for pair in points.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let (dx, dy) = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
        let length = dx.hypot(dy);
        let at = |s: f64| (from.0 + (s / length * dx).round() as i32, from.1 + (s / length * dy).round() as i32);
        for n in (walked / period) as usize..=((walked + length) / period) as usize {
            let start = n as f64 * period - walked;
            let (start, end) = (start.max(0.0), (start + dash).min(length));
            if start < end {
                found.push([at(start), at(end)]);
            }
        }
        walked += length;
    }
    found
}

/// A range with room around all values, by a factor on both sides, and over a factor of `least` at least.
fn around(values: impl Iterator<Item = f64>, room: f64, least: f64) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, 0.0), |(low, high), x| (x.min(low), x.max(high)));
    let low = if low.is_finite() { low } else { 1.0 };
    low / room..high.max(low * least) * room
}

/// `32`, `1k`, `128k`, `1M`.
fn length_label(length: f64) -> String {
    let k = 1024.0;
    match length {
        x if x >= k * k => format!("{}M", x / k / k),
        x if x >= k => format!("{}k", x / k),
        x => x.to_string(),
    }
}

impl Unit {
    /// Of a step of the axis, such as `20 ms`.
    fn label(self, x: f64) -> String {
        let text = match self {
            Self::Time => time(x),
            Self::Memory => bytes(x),
        };
        text.replace(".00", "").replace(".0", "")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The command's own font; in the workspace only.
    pub(crate) const FONT: &[u8] = include_bytes!("../assets/DejaVuSans-latin.ttf");

    fn line(label: &str, colour: Option<usize>, points: &[(f64, f64)]) -> Line {
        Line { label: label.into(), points: points.to_vec(), look: Look { colour, dashed: colour == Some(1) } }
    }

    fn plot() -> Plot {
        Plot {
            name: "example".into(),
            title: "An example".into(),
            subtitle: "of nothing".into(),
            quantity: "time per call",
            unit: Unit::Time,
            lines: vec![
                line("a quadratic one", None, &[(32.0, 1e-6), (1024.0, 1e-3)]),
                line("a dashed one", Some(1), &[(32.0, 3e-6), (1024.0, 1e-4)]),
                line("a full one", Some(2), &[(32.0, 4e-6), (1024.0, 2e-4)]),
                line("one without points", Some(3), &[]),
            ],
            marks: vec![Mark { at: (90.0, 8e-6), look: Look { colour: Some(1), dashed: false } }],
        }
    }

    #[test]
    fn a_plot_has_axes_a_legend_and_marks() {
        use_font(FONT).unwrap();
        let svg = plot().svg().unwrap();
        for part in [
            "An example",
            "of nothing",
            "time per call",
            "sequence length (tokens)",
            "a dashed one",
            "100 µs",
            "1k",
            ">\n90\n",
        ] {
            assert!(svg.contains(part), "{part}\n{svg}");
        }
        assert!(!svg.contains("one without points") && !svg.contains("NaN"));
        let png = plot().png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        for colour in [COLOURS[1], COLOURS[2], TEXT] {
            assert!(pixels.chunks(3).any(|p| p == [colour.0, colour.1, colour.2]), "{colour:?}");
        }
    }

    #[test]
    fn nothing_and_one_point_are_drawn_too() {
        use_font(FONT).unwrap();
        for lines in [vec![], vec![line("a", Some(0), &[(64.0, 1.0)])]] {
            let plot = Plot { lines, marks: Vec::new(), ..plot() };
            assert!(plot.svg().unwrap().contains("</svg>"));
            plot.png().unwrap();
        }
    }

    #[test]
    fn ticks_read_well() {
        assert_eq!([32.0, 1024.0, 131_072.0, 1_048_576.0].map(length_label), ["32", "1k", "128k", "1M"]);
        assert_eq!(
            [1e-9, 2e-6, 1e-4, 0.1, 1.0, 100.0].map(|x| Unit::Time.label(x)),
            ["1 ns", "2 µs", "100 µs", "100 ms", "1 s", "100 s"]
        );
        assert_eq!([1.0, 1e4, 1e6, 1e10].map(|x| Unit::Memory.label(x)), ["1 B", "10 kB", "1 MB", "10 GB"]);
    }
}
