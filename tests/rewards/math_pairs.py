r"""Answers that are easily judged wrong: (stated, wanted) pairs that say the same, pairs that do not, and completions.

Every stated answer of the first two lists is put into \boxed{}.
"""

SAME = r"""
50\% | 0.5
50\% | 50\%
50% | \frac{1}{2}
0.5 | 50\%
1/2 | 50\%
50 | 50\%
50\text{ percent} | 50\%
18\% | 18
12.5\% | \frac{1}{8}
(C) | C
\text{(C)} | C
C | (C)
\text{C} | \text{(C)}
c | C
(c) | C
C. | C
C) 12 | C
(C) 12 apples | C
\textbf{(C)}\ 12 | C
\mathrm{C} | C
\text{Option C} | C
\text{Monday} | Monday
Monday | \text{Monday}
monday | \text{Monday}
\textbf{Monday} | Monday
\text{No solution} | no solution
\text{the circle} | circle
\text{yes} | Yes
even | \text{even}
1e3 | 1000
1000 | 1e3
1E3 | 1000
2.5e-3 | 0.0025
10^3 | 1000
10^{3} | 1e3
1\times 10^3 | 1000
1 \cdot 10^{3} | 1000
1.5\times10^{-3} | 0.0015
1,000 | 1000
1{,}000 | 1000
1\,000 | 1000
1 000 | 1000
12,345,678.5 | 12345678.5
2 million | 2000000
1.5 \text{ thousand} | 1500
1 dozen | 12
\$18 | 18
\$18.00 | 18
\$1{,}800 | 1800
-\$5 | -5
18\text{ dollars} | \$18
18 dollars per day | 18
18 \text{ cm}^2 | 18
18\ \text{cm} | 18\text{ centimeters}
18 \mathrm{~km} | 18
5 \text{ feet} | 5 ft
5\text{ m/s} | 5 meters per second
18 \text{ square units} | 18
18\text{ apples} | 18
90^\circ | 90
90 | 90^\circ
90^{\circ} | 90^\circ
90 degrees | 90^{\circ}
x=5 | 5
5 | x=5
x = 5 | x=5
x_1 = 5 | 5
f(x) = 2x | 2x
x \in [1,2] | [1,2]
y = 2x+1 | y=1+2x
3+4=7 | 7
\frac{1}{2} | 0.5
\frac12 | \frac{1}{2}
\dfrac{1}{2} | \frac{1}{2}
\tfrac{1}{2} | 1/2
1/2 | \frac{1}{2}
2/4 | \frac{1}{2}
.5 | \frac{1}{2}
0.75 | \frac{3}{4}
75\% | \frac34
-\frac{1}{2} | \frac{-1}{2}
\frac{2}{-4} | -\frac{1}{2}
3\frac{1}{2} | 3.5
3 1/2 | \frac{7}{2}
\frac{7}{2} | 3\frac{1}{2}
073 | 73
73 | 073
73.0 | 73
73. | 73
+73 | 73
(73) | 73
{73} | 73
\mathbf{73} | 73
\boxed{73} | 73
$73$ | 73
\left(73\right) | 73
73 \, | 73
\displaystyle 73 | 73
2\sqrt{3} | \sqrt{12}
\sqrt{12} | 2\sqrt{3}
\sqrt{324} | 18
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt 2}
\sqrt[3]{8} | 2
9+9 | 18
2^{10} | 1024
1024 | 2^{10}
2^{3^2} | 512
5! | 120
\binom{5}{2} | 10
\log_2 8 | 3
\sin(\pi/6) | \frac{1}{2}
e^{\ln 2} | 2
\pi/2 | \frac{\pi}{2}
\frac{\pi}{2} | \frac12\pi
\frac{3\pi}{2} | 1.5\pi
x^2+2x+1 | (x+1)^2
(x+1)^2 | x^2+2x+1
(x-1)(x+1) | x^2-1
\frac{x}{2} | 0.5x
A=\pi r^2 | \pi r^2
2i+1 | 1+2i
\{1,2\} | \{2,1\}
2,1 | 1,2
1 \text{ and } 2 | 1,2
(1,2) | (1,2)
( 1 , 2 ) | (1,2)
\left(\frac12, 3\right) | (0.5, 3)
[1,2) | [1,2)
(-\infty,3) | x<3
x<3 | (-\infty, 3)
(-\infty, 1)\cup(2,\infty) | (2,\infty) \cup (-\infty,1)
\pm 2 | \pm 2
x=\pm 2 | \pm2
2,-2 | \pm 2
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
3:4 | 3:4
10:30 | 10:30
\infty | \infty
\emptyset | \emptyset
\mathbb{R} | \mathbb{R}
18 | #### 18
18 | She has 9 + 9 = <<9+9=18>>18 eggs.\n#### 18
18 | \boxed{18}
18 | $18$
32348 | \$32,\!348
\frac{1}{3} | 0.\overline{3}
0.1\overline{6} | \frac{1}{6}
[3,\infty) \cup (-\infty,-2] | x \in (-\infty, -2] \cup [3, \infty)
1+\sqrt{19}, 1-\sqrt{19} | 1 \pm \sqrt{19}
-5i+6 | 6 - 5i
y = 3 - x/2 | y=-\frac{1}{2}x+3
2\cdot 2^n-1 | 2^{n+1}-1
2^{1/3} | \sqrt[3]{2}
2x^2-5x-3 | (2x+1)(x-3)
x=1 \text{ or } x=2 | 1,2
15\text{ square cm} | 15\mbox{ cm}^2
-0 | 0
100\% | 1
"""

DIFFERENT = r"""
51\% | 0.5
50 | 0.5
0.5\% | 0.5
0.05 | 50\%
500\% | 50\%
(B) | C
C or D | C
(C) or (D) | C
(C), (D) | C
C and D | C
CD | C
12 | C
Tuesday | \text{Monday}
not Monday | Monday
Monday or Tuesday | Monday
Monday Tuesday | Monday
1e4 | 1000
1e-3 | 1000
1e | 1
6 or 5 | 5
6 or 5 | 6
5, 6 | 5
5 \text{ or } 6 | 5
5 and 6 | 5
\pm 5 | 5
5 \to 6 | 5
0.333333 | \frac{1}{3}
\frac{1}{3} | 0.333333
0.33 | \frac13
0.333333333333x | \frac{x}{3}
3.14 | \pi
3.14159265 | \pi
\frac{22}{7} | \pi
1.41421356 | \sqrt{2}
3.0001 | 3
2.9999999999 | 3
-18 | 18
18 | -18
180 | 18
1.8 | 18
18.5 | 18
18x | 18
18+x | 18
18\pi | 18
18 pi | 18
18i | 18
1 8 | 18
1,8 | 18
1,00 | 100
1.000 | 1000
10,0 | 100
81 | 18
18/2 | 18
18^2 | 18
18! | 18
18 or so | 18
18 < x | 18
\sqrt{18} | 18
y=5 | x=5
x=6 | 5
5 cm | 5 m
5 \text{ cm} | 5\text{ inches}
5 \text{ km} | 5 \text{ miles}
\$5 | 5 \text{ euros}
5 \text{ cm}^2 | 5 \text{ cm}^3
1,2 | 2
2 | 1,2
1 | \{1,2\}
\{1,2,3\} | \{1,2\}
(2,1) | (1,2)
[1,2] | (1,2)
(1,2) | [1,2)
x+1 | x-1
x^2 | x
-x | x
2x | x^2
x | y
\frac{x+1}{x} | \frac{x-1}{x}
\sqrt{3} | \sqrt{2}
\sqrt{5} | 5
3 1/2 | \frac{3}{2}
\frac{2}{1} | \frac{1}{2}
\frac{1}{0} | 5
\frac{5}{0} | 0
\frac{0}{0} | 0
\begin{pmatrix}2\\1\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
2:3 | 3:4
4:3 | 3:4
10:31 | 10:30
x>3 | x<3
x\le 3 | x<3
x<4 | (-\infty,3)
9**9**9**9 | 5
9^{9^{9^9}} | 5
9^9^9^9 | 387420489
10^{999999999} | 5
(10^9)^{10^9} | 5
99999999! | 5
((9!)!)! | 5
1e999999999 | 5
1e400000 | 5
nan | 5
NaN | NaN5
inf | 5
\infty | 5
-\infty | \infty
True | 1
None | 0
five | 6
{} | 5
\text{} | 5
? | 5
\boxed{} | 5
__import__('os') | 5
lambda: 5 | 5
5; 6 | 5
(-\infty,-2)\cup[3,\infty) | x \in (-\infty, -2] \cup [3, \infty)
1+\sqrt{19} | 1 \pm \sqrt{19}
6+5i | 6 - 5i
q-p | p - q
-2,-1 | 1,-2
a=2, b=1 | a=1, b=2
1267650600228229401496703205377 | 2^{100}
1\% | 1
100 | 1
0.\overline{3} | 0.333333
"""

RIGHT_TEXTS = [
    ("The answer is 18.", "18"),
    ("So she has 18 dollars left.", "18"),
    ("9 + 9 = 18", "18"),
    ("#### 18", "18"),
    ("work\n#### 1,234\n", "1234"),
    ("**Answer:** 18", "18"),
    ("**Answer:**\n\n18", "18"),
    ("Final answer: $18$", "18"),
    ("The final answer is $\\boxed{18}$. I hope it is correct.", "18"),
    ("First \\boxed{17}, no: \\boxed{18}", "18"),
    ("\\boxed{2} and \\boxed{3}", "2,3"),
    ("$\\boxed{2}$ or $\\boxed{3}$", "2 \\text{ or } 3"),
    ("<think>17</think>18", "18"),
    ("<think>\\boxed{17}</think>\nThe answer is \\boxed{18}.", "18"),
    ("thoughts that the prompt opened: 17</think>The answer is 18.", "18"),
    ("The answer is (C).", "C"),
    ("The answer is C", "C"),
    ("Answer: C) 12", "C"),
    ("The correct answer is option B.", "B"),
    ("So the correct option is (D)", "D"),
    ("(A) is wrong.\nThe answer is (B)", "B"),
    ("A", "A"),
    ("**C**", "C"),
    ("18", "18"),
    ("$18$", "18"),
    ("\\boxed 7", "7"),
    ("\\fbox{7}", "7"),
    ("Therefore $x = 18$.", "18"),
    ("Thus\n\\[ x = 18 \\]", "18"),
    ("He needs 3/4 of it", "3/4"),
    ("Thus it is 75%", "0.75"),
    ("The result is -5", "-5"),
    ("The answer is Monday.", "Monday"),
    ("The answer is $\\frac{1}{2}$.", "0.5"),
    ("The answer is $50\\%$.", "0.5"),
    ("The answer is $50$ percent.", "0.5"),
    ("The answer to the question is: 18 apples, because 9+9=18.", "18"),
    ("Answer: 18 (eighteen)", "18"),
    ("She pays $18.", "18"),
    ("She pays $18.50 in total", "18.5"),
    ("the answer is 18\n\n(see above for 17 steps)", "18"),
    ('{"answer": 5}', "5"),
    ("\\boxed{5}\n```python\nprint(6)\n```", "5"),
    ("She has 3 cats and 2 dogs, 5 pets", "5"),
    ("5\x00", "5"),
    ("5\ud800", "5"),
    ("\\boxed{\ud83d5}", "5"),
    ("\u200b5\u200b", "5"),
    ("\u22125", "-5"),
    ("90\u00b0", "90"),
    ("The answer is 3\u00bd.", "3.5"),
    (" " * 1_000_000 + "5", "5"),
    ("\n" * 1_000_000 + "5", "5"),
    ("17 " * 300_000 + "\\boxed{18}", "18"),
    ("\\boxed{5}" + " and \\boxed{6}" * 3, "5, 6, 6, 6"),
]

WRONG_TEXTS = [
    ("First \\boxed{18}, no: \\boxed{17}", "18"),
    ("$\\boxed{2}$ or $\\boxed{3}$", "2"),
    ("\\boxed{18}\\boxed{19}", "18"),
    ("<think>18</think>17", "18"),
    ("<think>the answer is 18", "18"),
    ("<think>\\boxed{18}", "18"),
    ("<think>18</think>", "18"),
    ("The answer is (A) or (B)", "A"),
    ("It is a dog.", "A"),
    ("I choose one of A, B, C and D", "D"),
    ("The answer is 6 or 5.", "5"),
    ("It could be 6 or 5", "5"),
    ("It could be 6 or 5", "6"),
    ("We get 5 or 6 apples in the end", "6"),
    ("", "18"),
    ("   ", "18"),
    ("I don't know", "18"),
    ("\\boxed{18", "18"),
    ("18 \\boxed{", "18"),
    ("\\boxed{}", "18"),
    ("\\boxed{17} 18", "18"),
    ("The result is 5", "-5"),
    ("It falls on a Monday, or a Tuesday", "Monday"),
    ("She pays $18.50 in total", "18"),
    ("the answer is not 5", "5"),
    ("The answer is between 4 and 6", "6"),
    ("The answer is at least 5", "5"),
    ("The time is 3:30", "30"),
    ("On 2024-05-18", "18"),
    ("see section 1.18", "18"),
    ("1\x005", "15"),
    ("1\u200b5", "15"),
    ("\ud800", "5"),
    ("\x00\x01\x1b[31m", "5"),
    ("x" * 1_000_000, "18"),
    ("1" * 1_000_000, "5"),
    ("9**" * 300_000 + "9", "5"),
    ("\\boxed{" * 100_000, "18"),
    ("\\boxed{" + "{" * 5000 + "}" * 5000 + "}", "5"),
    ("\\boxed{" + "(" * 150 + "5" + ")" * 150 + "}", "5"),
    ("(" * 100_000, "5"),
    ("$" * 100_001, "5"),
    ("$ " * 100_000, "5"),
    ("\\(" * 100_000, "5"),
    ("\\[" * 100_000, "5"),
    ("1," * 200_000, "5"),
    ("1 or " * 100_000, "5"),
    ("1/" * 100_000, "5"),
    ("-" * 200_000, "5"),
    ("answer" * 100_000, "5"),
    ("answer is " * 50_000, "5"),
    ("\\frac{" * 50_000, "5"),
    ("\\boxed{5}" * 50_000, "5"),
]


def pairs(table):
    """The lines of a table as (stated in a box, wanted)."""
    lines = [line.split(" | ") for line in table.strip().splitlines()]
    return [(f"\\boxed{{{stated}}}", wanted.replace("\\n", "\n")) for stated, wanted in lines]
