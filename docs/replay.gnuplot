# Error of replay against the number of passes: from the table that `fbt experiment replay` writes
# to an SVG.   gnuplot -e "table='replay.tsv'; figure='replay.svg'" docs/replay.gnuplot
set terminal svg noenhanced size 720,480 font 'sans-serif,13' background 'white'
set output figure
set datafile separator "\t"
set logscale y
set format y '%g'
set xlabel 'passes'
set ylabel 'K error, %'
set xrange [1:32]
set yrange [1e-5:200]
set lmargin 12
set xtics (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
set grid ytics lt 1 lc rgb '#dddddd'
set key inside bottom left Left reverse samplen 2
# The table has f32 and bf16 of every recipe: one colour each, bf16 dashed. The public PyTorch
# implementation's errors are of the paper's 1B model, over 1,670 tokens.
$public << END
1	21.9
2	2.66
3	1.17
4	1.08
32	1.07
END
plot for [i = 2:6:2] table using 1:(100 * column(i)) title columnheader(i) with lines lw 2 lc i / 2, \
     for [i = 3:7:2] table using 1:(100 * column(i)) title columnheader(i) with lines lw 2 lc i / 2 \
         dt 2, \
     $public using 1:2 title "public implementation, 1B, bf16" with points pt 7 ps 0.7 lc rgb 'black'
