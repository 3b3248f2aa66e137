# FineWeb-Edu (the published runs read 100B tokens of it): python data/prepare.py fineweb_edu

dataset = "fineweb_edu"
